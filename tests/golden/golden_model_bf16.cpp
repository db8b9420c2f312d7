// Backends with bf16 activations: the trained model against its fp32 vectors by divergence, its greedy samples, and
// rows that must not see each other. Counts nothing where there is no such backend (the CPU's activations are fp32).
#include <cmath>
#include <cstdio>
#include <fstream>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/strings.h"
#include "tests/golden/model_harness.h"

namespace glm53::golden {
namespace {

constexpr double kMeanDivergence = 1e-3;                         // of the README of glm53-tiny, bf16
constexpr double kFp8Divergence = 0.02, kInt4Divergence = 0.02;  // seen: 0.0043 and 0.0009
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

/// Mean over rows of KL(p ‖ q) of the softmaxes, in nats.
double mean_divergence(const Values& p, const Values& q) {
  double total = 0;
  for (int64_t r = 0; r < p.rows(); ++r) {
    const auto a = p.row(r), b = q.row(r);
    const auto log_sum = [](std::span<const float> z) {
      double top = -INFINITY, sum = 0;
      for (const float v : z) top = std::max(top, double{v});
      for (const float v : z) sum += std::exp(v - top);
      return top + std::log(sum);
    };
    const double la = log_sum(a), lb = log_sum(b);
    for (size_t i = 0; i < a.size(); ++i) total += std::exp(a[i] - la) * ((a[i] - la) - (b[i] - lb));
  }
  return total / static_cast<double>(p.rows());
}

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

// Every backend: what quantised dense weights cost, against the same model as stored.
TEST_CASE("dense weights in fp8 and 4 bits: divergence from the model as stored") {
  const Reference golden("tests/golden/data/exl3-tiny/golden.safetensors");
  using enum WeightGroup;
  for (const auto& ops : test_backends()) {
    const auto comm = make_single_communicator();
    for (const auto& [format, most] :
         {std::pair{WeightFormat::fp8_row, kFp8Divergence}, {WeightFormat::int4_g32, kInt4Divergence}}) {
      FormatPolicy policy = FormatPolicy::as_stored();
      for (const WeightGroup g : {kda_in, kda_out, mla, shared_expert, dense_mlp, head})
        policy.of_group[static_cast<size_t>(g)] = format;
      Runner stored(source_path(kTrained), trained_limits(), 4, *ops, *comm),
          quantised(source_path(kTrained), trained_limits(), 4, *ops, *comm, policy);
      double total = 0;
      int sequence = 0;
      for (const std::string name : {"story", "count", "tool", "long"}) {
        const std::vector<int32_t> ids = golden.ids(name + ".ids");
        const auto n = static_cast<int>(ids.size());
        const Values a = stored.prefill(sequence, ids, n), b = quantised.prefill(sequence, ids, n);
        ++sequence;
        CHECK_FALSE(same_bits(a, b));
        total += mean_divergence(a, b) / 4;
      }
      const std::string what = cat(ops->backend(), format == WeightFormat::fp8_row ? " fp8" : " int4");
      MESSAGE(what << ": mean divergence " << total);
      CHECK(total < most);
    }
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
