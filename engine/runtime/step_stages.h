// Where the time of a step goes, and what it reads: counted on rank 0 for /metrics.
#pragma once

#include <array>
#include <cstdint>

#include "engine/runtime/wire.h"

namespace glm53 {

struct StepPlan;
class Model;

/// In the order of wire::kStages.
enum class Stage : uint8_t { plan, send, move, draft, forward, observe, sample, complete };

/// What one step cost by stage.
class StageCosts {
 public:
  void add(Stage stage, double ms, double bytes = 0) {
    ms_[index(stage)] += ms;
    bytes_[index(stage)] += bytes;
  }
  double ms(Stage stage) const { return ms_[index(stage)]; }
  double bytes(Stage stage) const { return bytes_[index(stage)]; }

 private:
  static size_t index(Stage stage) { return static_cast<size_t>(stage); }
  std::array<double, wire::kStages.size()> ms_{}, bytes_{};
};

/// Bytes of weights on this rank that a pass reads.
class WeightReads {
 public:
  explicit WeightReads(const Model& model);
  WeightReads(double fixed, double head, double experts, double expert_share)
      : fixed_(fixed), head_(head), experts_(experts), expert_share_(expert_share) {}
  /// Of `rows` rows through this part of the layers. All weights of the layers but the experts are read once; of these
  /// as many as rows that choose independently are expected to hit, E (1 - (1 - k/E)^rows); the head when there are
  /// logits.
  double bytes(int rows, int logit_rows, double layers = 1) const;

 private:
  double fixed_ = 0, head_ = 0, experts_ = 0;
  double expert_share_ = 0;  // k/E
};

/// Sums over the steps of a generation.
class StepTimes {
 public:
  /// A step of this plan took `ms` in all.
  void add(const StepPlan& plan, const StageCosts& costs, double ms);
  void fill(wire::Stats& stats) const;

 private:
  // In microseconds and bytes, kept with fractions: a step's stage may be shorter than a microsecond.
  std::array<double, wire::kStages.size()> us_{}, bytes_{};
  std::array<double, wire::kStepKinds.size()> step_us_{};
  std::array<uint64_t, wire::kStepCounts> counts_{};
};

}  // namespace glm53
