#include "engine/runtime/step_stages.h"

#include <algorithm>
#include <cmath>

#include "engine/loader/formats.h"
#include "engine/model/model.h"
#include "engine/runtime/plan.h"

namespace glm53 {
namespace {

/// Of a step, by what its sequences do; in the order of wire::kStepKinds.
size_t kind_of(const StepPlan& plan) {
  const bool windows = !plan.seqs.empty() && plan.seqs.front().regime == Regime::window;
  const bool chunks = plan.piece.last > 0 || (!plan.seqs.empty() && plan.seqs.back().regime == Regime::chunk);
  if (!chunks) return 0;
  return windows ? 1 : 2;
}

uint64_t whole(double value) {
  return static_cast<uint64_t>(value);
}

}  // namespace

WeightReads::WeightReads(const Model& model) {
  for (const auto& [group, bytes] : model.weight_bytes()) {
    if (group == name(WeightGroup::routed_expert))
      experts_ += static_cast<double>(bytes);
    else if (group == name(WeightGroup::head))
      head_ += static_cast<double>(bytes);
    else
      fixed_ += static_cast<double>(bytes);
  }
  // Of the embedding only the rows of the tokens are read.
  if (const Weight* embedding = model.shared().embedding)
    fixed_ = std::max(0.0, fixed_ - static_cast<double>(embedding->codes.bytes()));
  const ModelConfig& config = model.config();
  if (config.experts > 0) expert_share_ = static_cast<double>(config.experts_per_token) / config.experts;
}

double WeightReads::bytes(int rows, int logit_rows, double layers) const {
  if (rows <= 0) return 0;
  const double hit = 1 - std::pow(1 - expert_share_, rows);
  return layers * (fixed_ + experts_ * hit) + (logit_rows > 0 ? head_ : 0);
}

void StepTimes::add(const StepPlan& plan, const StageCosts& costs, double ms) {
  for (size_t i = 0; i < us_.size(); ++i) {
    us_[i] += costs.ms(static_cast<Stage>(i)) * 1000;
    bytes_[i] += costs.bytes(static_cast<Stage>(i));
  }
  const size_t kind = kind_of(plan);
  step_us_[kind] += ms * 1000;
  const auto bucket = std::ranges::lower_bound(wire::kStepBuckets, ms / 1000) - wire::kStepBuckets.begin();
  ++counts_[kind * (wire::kStepBuckets.size() + 1) + static_cast<size_t>(bucket)];
}

void StepTimes::fill(wire::Stats& stats) const {
  std::ranges::transform(us_, stats.stage_us.begin(), whole);
  std::ranges::transform(bytes_, stats.stage_bytes.begin(), whole);
  std::ranges::transform(step_us_, stats.step_us.begin(), whole);
  stats.step_counts = counts_;
}

}  // namespace glm53
