// What steps cost, learned from those that ran; and how much of the time prompts may take from generation.
#pragma once

#include <cstdint>

namespace glm53 {

/// A line through the newest observations (x, y), older ones counting less and less. Neither falls nor is negative.
class LineFit {
 public:
  void observe(double x, double y);
  bool known() const { return weight_ > 0; }
  double at(double x) const;
  /// Largest x with at(x) <= y; infinite when nothing costs anything, 0 when even at(0) is more.
  double reach(double y) const;

 private:
  void line(double& base, double& slope) const;
  double weight_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;
};

/// Milliseconds of a step: what its window rows cost, and what its prompt rows cost on top.
class StepCost {
 public:
  void observe(int32_t window_rows, int32_t chunk_rows, double ms);
  bool window_known() const { return window_.known(); }
  bool chunk_known() const { return chunk_.known(); }
  double window_ms(int32_t rows) const { return rows > 0 && window_.known() ? window_.at(rows) : 0; }
  double chunk_ms(int32_t rows) const { return rows > 0 && chunk_.known() ? chunk_.at(rows) : 0; }
  /// Most rows of a prompt that cost at most `ms`; at most `most`.
  int32_t chunk_rows(double ms, int32_t most) const;

 private:
  LineFit window_, chunk_;
};

/// Keeps the time that prompts take beside generating sequences at a share of the whole. A piece may run when nothing
/// is owed; what it costs is owed then, and each step's generating part pays share / (1 - share) of its own time.
class PrefillShare {
 public:
  /// `share` in (0, 1); no piece takes longer than max_ms while anybody generates, the smallest excepted.
  PrefillShare(double share, double max_ms);
  /// Rows of prompts for the next step, at most `most`: all of it when nobody generates. A multiple of 64 else, and
  /// none before it is known what a step costs without.
  int32_t rows(int32_t window_rows, const StepCost& cost, int32_t most) const;
  /// A step was planned, and ran: `window_ms` is 0 when nobody generated.
  void planned(double chunk_ms) { owed_ms_ += chunk_ms; }
  void ran(double planned_ms, double window_ms, double chunk_ms);
  double owed_ms() const { return owed_ms_; }

 private:
  const double ratio_, max_ms_;
  double owed_ms_ = 0;
};

}  // namespace glm53
