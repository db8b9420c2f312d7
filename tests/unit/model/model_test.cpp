// Models of random weights with what the golden checkpoints lack: shared indexers, expert groups, two streams, packed
// experts on two ranks.
#include <algorithm>
#include <cmath>
#include <functional>

#include <doctest/doctest.h>

#include "engine/loader/generated.h"
#include "engine/model/load.h"
#include "tests/golden/model_harness.h"
#include "tests/golden/two_ranks.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using golden::Runner;
using golden::Values;
using testing::caught;

class SmallModel {
 public:
  explicit SmallModel(bool exl3, const std::function<void(testing::NewTensors&)>& edit = {}) {
    const std::string config = testing::small_config().dump();
    testing::write_text(dir_ / "config.json", config);
    testing::NewTensors tensors = testing::SmallCheckpoint(parse_model_config(config, "config.json"), exl3).tensors;
    if (edit) edit(tensors);
    testing::write_text(dir_ / "model.safetensors", testing::file_of(tensors));
  }
  const std::string& path() const { return dir_.path(); }

 private:
  testing::TempDir dir_;
};

ModelLimits limits() {
  ModelLimits l;
  l.max_rows = 128;
  l.max_context = 192;
  l.max_logit_rows = 128;
  return l;
}

std::vector<int32_t> prompt(int n) {
  std::vector<int32_t> ids;
  for (int i = 0; i < n; ++i) ids.push_back((i * 37 + 11) % 90);
  return ids;
}

TEST_CASE("a shared indexer attends to what the layer before it selected") {
  const auto ops = make_cpu_ops(1);
  const auto comm = make_single_communicator();
  const SmallModel model(false);
  Runner run(model.path(), limits(), 1, *ops, *comm);
  run.watch();
  run.prefill(0, prompt(100), 128);
  CHECK(golden::same_bits(run.seen("mla1.selected"), run.seen("mla2.selected")));
  CHECK(golden::same_bits(run.seen("mla1.n_selected"), run.seen("mla2.n_selected")));
  CHECK(run.seen("mla1.n_selected").data.back() == 4);    // of 25 complete pools
  CHECK_THROWS_AS((void)run.seen("mla2.scores"), Error);  // nothing is scored again
  CHECK_FALSE(golden::same_bits(run.seen("mla1.latent"), run.seen("mla2.latent")));
}

TEST_CASE("two ranks agree with one, packed and unpacked experts") {
  for (const bool exl3 : {false, true}) {
    CAPTURE(exl3);
    const auto ops = make_cpu_ops(1);
    const auto comm = make_single_communicator();
    const SmallModel model(exl3);
    Runner alone(model.path(), limits(), 1, *ops, *comm);
    const Values expected = alone.prefill(0, prompt(90), 128);
    Values found;
    size_t bytes[2] = {0, 0};
    golden::run_ranks(2, [&](golden::ThreadGroup::Member& member) {
      const auto own = make_cpu_ops(1);
      Runner run(model.path(), limits(), 1, *own, member);
      const Values logits = run.prefill(0, prompt(90), 128);
      if (member.shard().rank == 0) found = logits;
      for (const auto& line : run.model().weight_bytes()) bytes[member.shard().rank] += line.second;
      CHECK(run.model().geometry().kda_heads == 1);
    });
    CHECK(golden::largest_difference(found, expected) < 1e-3f);
    size_t whole = 0;
    for (const auto& line : alone.model().weight_bytes()) whole += line.second;
    CHECK(bytes[0] == bytes[1]);
    CHECK(bytes[0] < whole);
    CHECK(2 * bytes[0] > whole);  // norms, router and indexer are on both
  }
}

TEST_CASE("progress ends at the total, and the ledger counts what was taken") {
  const auto ops = make_cpu_ops(1);
  const auto comm = make_single_communicator();
  const SmallModel files(false);
  std::vector<std::pair<uint64_t, uint64_t>> reports;
  const auto model = load_model(files.path(), FormatPolicy::as_stored(), limits(), *ops, *comm,
                                [&](uint64_t done, uint64_t total) { reports.emplace_back(done, total); });
  REQUIRE(reports.size() == 5);  // start, outside, three layers
  CHECK(reports.front().first == 0);
  CHECK(reports.back().first == reports.back().second);
  for (size_t i = 1; i < reports.size(); ++i) CHECK(reports[i].first > reports[i - 1].first);
  size_t bytes = 0;
  for (const auto& [group, n] : model->weight_bytes()) bytes += n;
  CHECK(bytes == reports.back().second);
  CHECK(model->config().layers == 3);
  CHECK(model->limits().max_rows == 128);
}

TEST_CASE("what a model refuses") {
  const auto ops = make_cpu_ops(1);
  const auto comm = make_single_communicator();
  const SmallModel files(false), broken(false, [](testing::NewTensors& t) { t.erase("lm_head.weight"); });
  const auto load = [&](const std::string& dir, const ModelLimits& l) {
    return caught([&] { (void)load_model(dir, FormatPolicy::as_stored(), l, *ops, *comm); });
  };
  CHECK(load(broken.path(), limits()).says("lm_head.weight"));
  CHECK(load("/nonexistent", limits()).code != Code::ok);
  ModelLimits l = limits();
  l.max_context = 1024;
  CHECK(load(files.path(), l).says("max_position_embeddings = 512"));
  l = limits();
  l.max_rows = 0;
  CHECK(load(files.path(), l).says("max_rows"));
  Runner run(files.path(), limits(), 1, *ops, *comm);
  CHECK(caught([&] { run.prefill(0, prompt(129), 129); }).says("batch capacity is 129"));
}

TEST_CASE("a step without logit rows, with padding only, and of dead drafts") {
  const auto ops = make_cpu_ops(1);
  const auto comm = make_single_communicator();
  const SmallModel files(false);
  Runner run(files.path(), limits(), 1, *ops, *comm);
  run.watch();
  const Values first = run.step({{0, prompt(9), Regime::chunk}}, false, 3);
  CHECK(first.rows() == 1);
  const Values& hidden = run.seen("norm");
  CHECK(hidden.rows() == 12);
  for (const float v : hidden.part(9, 12).data) CHECK(v == 0);
  const Values dead = run.step({{0, {5, -1, -1}, Regime::window}});
  for (const float v : dead.data) CHECK(std::isfinite(v));
  run.flush(0);
}

TEST_CASE("generated weights: the sizes of a checkpoint, finite, the same each time") {
  const SmallModel files(true);
  const ModelConfig config = load_model_config(files.path());
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8_row, WeightFormat::int4_g32}) {
    FormatPolicy policy = FormatPolicy::as_stored();
    for (const auto group : {WeightGroup::kda_in, WeightGroup::mla, WeightGroup::head})
      policy.of_group[static_cast<size_t>(group)] = format;
    for (const int ranks : {1, 2}) {
      CAPTURE(ranks);
      Values seen[2];
      for (Values& logits : seen)
        golden::run_ranks(ranks, [&](golden::ThreadGroup::Member& member) {
          const auto ops = make_cpu_ops(1);
          Runner made(
              load_model(config, make_generated_source(config, policy, member.shard(), *ops), limits(), *ops, member),
              1, *ops);
          const Values out = made.prefill(0, prompt(90), 128);
          if (member.shard().rank != 0) return;
          logits = out;
          if (ranks > 1) return;
          Runner stored(files.path(), limits(), 1, *ops, member, policy);
          CHECK(made.model().weight_bytes() == stored.model().weight_bytes());
        });
      CHECK(golden::same_bits(seen[0], seen[1]));
      float largest = 0;
      for (const float v : seen[0].data) {
        REQUIRE(std::isfinite(v));
        largest = std::max(largest, std::fabs(v));
      }
      CHECK(largest > 0.01F);
      CHECK(largest < 1000);
    }
  }
}

}  // namespace
}  // namespace glm53
