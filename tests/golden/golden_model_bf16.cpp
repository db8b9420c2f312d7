// Backends with bf16 activations: the trained model against its fp32 vectors by divergence, its greedy samples, and
// rows that must not see each other. Counts nothing where there is no such backend (the CPU's activations are fp32).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <numeric>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/strings.h"
#include "tests/golden/model_harness.h"

namespace glm53::golden {
namespace {

constexpr double kMeanDivergence = 1e-3;                         // of the README of glm53-tiny, bf16
constexpr double kFp8Divergence = 0.02, kInt4Divergence = 0.02;  // seen: 0.0043 and 0.0009
constexpr double kHeldDivergence = 0.005;
constexpr float kTie = 0.25F;  // bf16 moves logits (standard deviation 3 to 4) by some hundredths
void for_each_bf16_backend(const std::function<void(Ops&)>& body) {
  int ran = 0;
  for (const auto& ops : test_backends()) {
    if (ops->activation() != Dtype::bf16) continue;
    std::printf("backend %s, bf16 activations\n", std::string(ops->backend()).c_str());
    body(*ops);
    ++ran;
  }
  if (ran == 0) std::printf("no backend with bf16 activations here, nothing counted\n");
}

/// KL(p ‖ q) of the softmaxes of each row, in nats.
std::vector<double> divergences(const Values& p, const Values& q) {
  std::vector<double> out;
  for (int64_t r = 0; r < p.rows(); ++r) {
    const auto a = p.row(r), b = q.row(r);
    const auto log_sum = [](std::span<const float> z) {
      double top = -INFINITY, sum = 0;
      for (const float v : z) top = std::max(top, double{v});
      for (const float v : z) sum += std::exp(v - top);
      return top + std::log(sum);
    };
    const double la = log_sum(a), lb = log_sum(b);
    double total = 0;
    for (size_t i = 0; i < a.size(); ++i) total += std::exp(a[i] - la) * ((a[i] - la) - (b[i] - lb));
    out.push_back(total);
  }
  return out;
}
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}
double mean_divergence(const Values& p, const Values& q) {
  return mean(divergences(p, q));
}

/// What a model's routers chose, and the way to make another model choose the same.
class Routing {
 public:
  void record(Ops& ops, Model& model) {
    model.set_probe([this, &ops](const std::string& what, const Tensor& value) {
      if (what.starts_with("router") && !what.ends_with(".logits")) chosen_[what] = fetch(ops, value);
    });
  }
  /// The model computes its own choice, which is counted, and goes on with the recorded one.
  void hold(Ops& ops, Model& model) {
    model.set_probe([this, &ops](const std::string& what, const Tensor& value) {
      const auto at = chosen_.find(what);
      if (at == chosen_.end()) return;
      if (what.ends_with(".index")) count(fetch(ops, value), at->second);
      const Buffer recorded = upload(ops, value.dtype, at->second);
      ops.copy(value, recorded.view(value.dtype, {value.dim(0), value.dim(1)}));
      ops.synchronize();
    });
  }
  /// Of the experts chosen for a row and layer, the share that another model would not have chosen.
  double changed() const { return static_cast<double>(other_) / static_cast<double>(std::max(all_, 1)); }

 private:
  void count(const Values& mine, const Values& recorded) {
    for (int64_t r = 0; r < mine.rows(); ++r)
      for (const float id : mine.row(r)) {
        const auto row = recorded.row(r);
        ++all_;
        other_ += std::find(row.begin(), row.end(), id) == row.end();
      }
  }
  std::map<std::string, Values> chosen_;
  int all_ = 0, other_ = 0;
};

TEST_CASE("bf16: divergence from the fp32 logits of glm53-tiny") {
  const Reference golden("tests/golden/data/exl3-tiny/golden.safetensors");
  for_each_bf16_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run(source_path(kTrained), trained_limits(), 4, ops, *comm);
    int sequence = 0;
    for (const std::string name : {"story", "count", "tool", "long"}) {
      CAPTURE(name);
      const std::vector<int32_t> ids = golden.ids(name + ".ids");
      const auto n = static_cast<int64_t>(ids.size());
      const Values logits = run.prefill(sequence++, ids, static_cast<int>(n));
      const double divergence = mean_divergence(golden.values(name + ".fp32.logits"), logits.part(n - 8, n));
      MESSAGE(name << ": mean divergence " << divergence);
      CHECK(divergence < kMeanDivergence);
    }
  });
}

TEST_CASE("bf16: greedy samples of glm53-tiny") {
  std::ifstream in(source_path("tests/golden/data/glm53-tiny/samples.json"));
  const nlohmann::json samples = nlohmann::json::parse(in);
  for_each_bf16_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run(source_path(kTrained), trained_limits(), static_cast<int>(samples.size()), ops, *comm);
    int sequence = 0, differ = 0, tokens = 0;
    for (const auto& sample : samples) {
      const auto output = sample.at("output_ids").get<std::vector<int32_t>>();
      const double margin = sample.at("smallest_margin").get<double>();
      CAPTURE(sample.at("name").get<std::string>());
      Values logits = run.prefill(sequence, sample.at("prompt_ids").get<std::vector<int32_t>>(), 448);
      for (size_t i = 0; i < output.size(); ++i) {
        if (i > 0) logits = run.step({{sequence, {output[i - 1]}, Regime::window}});
        const auto row = logits.row(logits.rows() - 1);
        const int64_t ours = argmax(row);
        ++tokens;
        if (ours == output[i]) continue;
        CAPTURE(i);
        ++differ;
        CHECK(margin < 1);
        CHECK(row[static_cast<size_t>(ours)] - row[static_cast<size_t>(output[i])] < kTie);
      }
      ++sequence;
    }
    MESSAGE(tokens << " tokens, " << differ << " at a tie");
    CHECK(differ <= 16);
  });
}

/// What quantised dense weights cost on the four reference texts.
struct FormatCost {
  double free = 0, held = 0;              ///< mean divergence: routers choose by themselves, or as stored
  double worst_free = 0, worst_held = 0;  ///< of a single row
  double changed = 0;                     ///< share of the experts that the routers would choose otherwise
};

FormatCost cost_of(Ops& ops, const FormatPolicy& policy) {
  const Reference golden("tests/golden/data/exl3-tiny/golden.safetensors");
  const auto comm = make_single_communicator();
  Runner stored(source_path(kTrained), trained_limits(), 4, ops, *comm),
      quantised(source_path(kTrained), trained_limits(), 8, ops, *comm, policy);
  FormatCost cost;
  Routing routing;
  int sequence = 0;
  for (const std::string name : {"story", "count", "tool", "long"}) {
    const std::vector<int32_t> ids = golden.ids(name + ".ids");
    const auto n = static_cast<int>(ids.size());
    routing.record(ops, stored.model());
    const Values expected = stored.prefill(sequence, ids, n);
    quantised.model().set_probe({});
    const auto free = divergences(expected, quantised.prefill(sequence, ids, n));
    routing.hold(ops, quantised.model());
    const auto held = divergences(expected, quantised.prefill(4 + sequence, ids, n));
    ++sequence;
    cost.free += mean(free) / 4;
    cost.held += mean(held) / 4;
    cost.worst_free = std::max(cost.worst_free, *std::max_element(free.begin(), free.end()));
    cost.worst_held = std::max(cost.worst_held, *std::max_element(held.begin(), held.end()));
  }
  cost.changed = routing.changed();
  return cost;
}

// Every backend. Where an expert changes, a token's distribution jumps, whatever the size of the error was; with the
// routing held the error of the weights is what remains, and the coarser format costs more.
TEST_CASE("dense weights in fp8 and 4 bits: divergence from the model as stored") {
  using enum WeightGroup;
  for (const auto& ops : test_backends()) {
    FormatCost costs[2];
    for (const int i : {0, 1}) {
      FormatPolicy policy = FormatPolicy::as_stored();
      for (const WeightGroup g : {kda_in, kda_out, mla, shared_expert, dense_mlp, head})
        policy.of_group[static_cast<size_t>(g)] = i == 0 ? WeightFormat::fp8_row : WeightFormat::int4_g32;
      const FormatCost& c = costs[i] = cost_of(*ops, policy);
      const std::string what = cat(ops->backend(), i == 0 ? " fp8" : " int4");
      MESSAGE(what << ": mean divergence " << c.free << ", worst row " << c.worst_free << "; routing held " << c.held
                   << ", worst row " << c.worst_held << "; experts that would change " << c.changed);
      CHECK(c.free > 0);
      CHECK(c.free < (i == 0 ? kFp8Divergence : kInt4Divergence));
      CHECK(c.held > 0);
      CHECK(c.held < kHeldDivergence);
      CHECK(c.changed < 0.1);
    }
    CHECK(costs[0].held < costs[1].held);
  }
}

// Every backend: a row alone and the same row among others have the same bits.
TEST_CASE("window rows do not see each other") {
  const Reference golden("tests/golden/data/exl3-tiny/golden.safetensors");
  for (const auto& ops : test_backends()) {
    const auto comm = make_single_communicator();
    const std::vector<int32_t> ids = golden.ids("long.ids");
    for (const int rows : {2, 3, 8, 16}) {
      CAPTURE(rows);
      Runner together(source_path(kTrained), trained_limits(), 3, *ops, *comm),
          alone(source_path(kTrained), trained_limits(), 3, *ops, *comm);
      const std::vector<int32_t> window(ids.begin() + 40, ids.begin() + 40 + rows);
      for (int s = 0; s < 3; ++s) {
        const auto prompt = std::span(ids).first(static_cast<size_t>(33 + s));
        together.prefill(s, prompt, 448);
        alone.prefill(s, prompt, 448);
      }
      const Values all =
          together.step({{0, window, Regime::window}, {1, window, Regime::window}, {2, window, Regime::window}});
      for (int s = 0; s < 3; ++s) {
        for (int r = 0; r < rows; ++r) {
          const Values one = alone.step({{s, {window[static_cast<size_t>(r)]}, Regime::window}});
          CHECK(same_bits(one, all.part(s * rows + r, s * rows + r + 1)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace glm53::golden
