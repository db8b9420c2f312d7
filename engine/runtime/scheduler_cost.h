// What steps cost, learned from those that ran; and how much of the time prompts may take from generation.
#pragma once

#include <cstdint>

namespace glm53 {

/// A line through the newest observations (x, y), older ones counting less and less. Neither falls nor is negative.
class LineFit {
 public:
  void observe(double x, double y);
  bool known() const { return weight_ > 0; }
  /// Whether the observations say anything of how y grows.
  bool sloped() const;
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
  /// A piece that took several steps has passed all layers, in `ms` altogether.
  void observe_piece(int32_t rows, double ms);
  /// Most rows of a prompt that cost at most `ms`; at most `most`.
  int32_t chunk_rows(double ms, int32_t most) const;
  /// Fewest rows that are read nearly as fast, by the row, as `most` at once.
  int32_t worthwhile_rows(int32_t most) const;

 private:
  LineFit window_, chunk_;
};

/// Keeps the time that prompts take beside generating sequences at a share of the whole. What a piece costs is owed,
/// and each step's generating part pays share / (1 - share) of its own time.
class PrefillShare {
 public:
  /// `share` in (0, 1); no piece takes longer than max_ms, all layers together, while anybody generates, the smallest
  /// excepted. `layers`: of the model, if a piece may stop between any two; 1: it passes all in one step.
  PrefillShare(double share, double max_ms, int32_t layers);
  /// Rows of prompts for the next piece, at most `most`: all of it when nobody generates. A multiple of 64 else, and
  /// none before it is known what a step costs without, or while too much is owed.
  int32_t rows(int32_t window_rows, const StepCost& cost, int32_t most) const;
  /// Layers that a piece of so many rows passes in the next step, of those `left` to it: all when nobody generates.
  int32_t layers(int32_t window_rows, const StepCost& cost, int32_t rows, int32_t left) const;
  /// What a piece costs in so many layers.
  double cost_ms(const StepCost& cost, int32_t rows, int32_t layers) const {
    return cost.chunk_ms(rows) * layers / layers_;
  }
  /// A step was planned, and ran: `window_ms` is 0 when nobody generated.
  void planned(double chunk_ms) { owed_ms_ += chunk_ms; }
  void ran(double planned_ms, double window_ms, double chunk_ms);
  double owed_ms() const { return owed_ms_; }

 private:
  const double ratio_, max_ms_;
  const int32_t layers_;
  double owed_ms_ = 0;
};

}  // namespace glm53
