// Where the time of steps goes: weights that a pass reads, and the sums that rank 0 reports.
#include <numeric>

#include <doctest/doctest.h>

#include "engine/runtime/plan.h"
#include "engine/runtime/step_stages.h"

using namespace glm53;

namespace {

SeqStep sequence(Regime regime) {
  SeqStep s;
  s.regime = regime;
  return s;
}

uint64_t steps_of(const wire::Stats& stats, size_t kind) {
  const size_t width = wire::kStepBuckets.size() + 1;
  const auto begin = stats.step_counts.begin() + static_cast<std::ptrdiff_t>(kind * width);
  return std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(width), uint64_t{0});
}

}  // namespace

TEST_CASE("a pass reads dense weights once, experts as rows hit them, and the head for logits") {
  const WeightReads reads(1000, 50, 800, 0.25);  // 8 experts, 2 a token
  CHECK(reads.bytes(0, 0) == 0);
  CHECK(reads.bytes(1, 0) == doctest::Approx(1000 + 200));
  CHECK(reads.bytes(1, 1) == doctest::Approx(1000 + 200 + 50));
  CHECK(reads.bytes(2, 2) == doctest::Approx(1000 + 800 * (1 - 0.75 * 0.75) + 50));
  CHECK(reads.bytes(512, 0) == doctest::Approx(1800));
  CHECK(reads.bytes(512, 0, 0.5) == doctest::Approx(900));
}

TEST_CASE("steps are counted by kind and time, stages summed below a microsecond") {
  StepTimes times;
  StepPlan decode, mixed, prefill, piece;
  decode.seqs = {sequence(Regime::window)};
  mixed.seqs = {sequence(Regime::window), sequence(Regime::chunk)};
  prefill.seqs = {sequence(Regime::chunk)};
  piece.piece = {2, 4};  // of a prompt that goes on, with nobody beside it
  StageCosts costs;
  costs.add(Stage::forward, 2, 1000);
  costs.add(Stage::plan, 0.0006);
  for (int i = 0; i < 5; ++i) times.add(decode, costs, 2.5);
  times.add(decode, costs, 2);  // the bucket's own bound
  times.add(mixed, costs, 6000);
  times.add(prefill, costs, 0.5);
  times.add(piece, costs, 0.5);
  wire::Stats stats;
  times.fill(stats);
  CHECK(stats.stage_us[static_cast<size_t>(Stage::forward)] == 18000);
  CHECK(stats.stage_bytes[static_cast<size_t>(Stage::forward)] == 9000);
  CHECK(stats.stage_us[static_cast<size_t>(Stage::plan)] == 5);
  CHECK(stats.stage_us[static_cast<size_t>(Stage::draft)] == 0);
  CHECK(steps_of(stats, 0) == 6);
  CHECK(steps_of(stats, 1) == 1);
  CHECK(steps_of(stats, 2) == 2);
  CHECK(stats.step_counts[1] == 1);                                  // up to 2 ms
  CHECK(stats.step_counts[2] == 5);                                  // up to 5 ms
  CHECK(stats.step_counts[2 * wire::kStepBuckets.size() + 1] == 1);  // mixed, over all bounds
  CHECK(stats.step_us[0] == 14500);
  CHECK(stats.step_us[2] == 1000);
  CHECK(wire::kStages[static_cast<size_t>(Stage::complete)] == "complete");
  CHECK(static_cast<size_t>(Stage::complete) + 1 == wire::kStages.size());
}
