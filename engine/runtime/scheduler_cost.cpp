#include "engine/runtime/scheduler_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/batch.h"

namespace glm53 {
namespace {

constexpr double kMemory = 0.9;  // of what was known, by each observation
constexpr double kGap = 2;       // prompts add at most so many times the time of the step they run beside
constexpr double kNearly = 0.8;  // of the pace of the largest piece is worth a smaller one

}  // namespace

void LineFit::observe(double x, double y) {
  for (double* sum : {&weight_, &x_, &y_, &xx_, &xy_}) *sum *= kMemory;
  weight_ += 1;
  x_ += x;
  y_ += y;
  xx_ += x * x;
  xy_ += x * y;
}

void LineFit::line(double& base, double& slope) const {
  const double mean_x = x_ / weight_, mean_y = y_ / weight_;
  // Through the origin where nothing else is known.
  slope =
      sloped() ? (xy_ / weight_ - mean_x * mean_y) / (xx_ / weight_ - mean_x * mean_x) : mean_y / std::max(mean_x, 1.0);
  slope = std::clamp(slope, 0.0, mean_x > 0 ? mean_y / mean_x : 0.0);
  base = mean_y - slope * mean_x;
}

/// Observations at (nearly) one x say nothing of a slope.
bool LineFit::sloped() const {
  if (!known()) return false;
  const double mean_x = x_ / weight_;
  return xx_ / weight_ - mean_x * mean_x > 1e-3 * mean_x * mean_x;
}

double LineFit::at(double x) const {
  double base = 0, slope = 0;
  line(base, slope);
  return base + slope * x;
}

double LineFit::reach(double y) const {
  double base = 0, slope = 0;
  line(base, slope);
  if (base > y) return 0;
  return slope > 0 ? (y - base) / slope : std::numeric_limits<double>::infinity();
}

void StepCost::observe(int32_t window_rows, int32_t chunk_rows, double ms) {
  if (ms < 0 || !std::isfinite(ms)) return;
  if (chunk_rows == 0)
    window_.observe(window_rows, ms);
  else if (window_rows == 0 || window_.known())
    chunk_.observe(chunk_rows, std::max(ms - window_ms(window_rows), 0.0));
}

void StepCost::observe_piece(int32_t rows, double ms) {
  if (ms >= 0 && std::isfinite(ms)) chunk_.observe(rows, ms);
}

/// With y = base + slope x, the pace x / y reaches k of the pace E of `most` at x = k E base / (1 - k E slope).
int32_t StepCost::worthwhile_rows(int32_t most) const {
  // Only larger pieces can tell how much faster they are.
  if (!chunk_.sloped()) return most;
  const double base = chunk_.at(0), whole = chunk_.at(most);
  if (whole <= 0) return most;
  const double pace = kNearly * most / whole, slope = (whole - base) / most;
  return static_cast<int32_t>(std::ceil(pace * base / (1 - pace * slope)));
}

int32_t StepCost::chunk_rows(double ms, int32_t most) const {
  if (!chunk_.known()) return 0;
  return static_cast<int32_t>(std::min(chunk_.reach(ms), static_cast<double>(most)));
}

PrefillShare::PrefillShare(double share, double max_ms, int32_t layers)
    : ratio_(share / (1 - share)), max_ms_(max_ms), layers_(layers) {
  if (!(share > 0) || !(share < 1) || !(max_ms > 0))
    throw Error(Code::config, cat("sched.prefill_share is ", share, ", sched.max_piece ", max_ms, " ms"),
                "a share between 0 and 1, and a positive time");
  if (layers < 1) throw Error(Code::config, cat("scheduler: a model of ", layers, " layers"), "at least 1");
}

int32_t PrefillShare::rows(int32_t window_rows, const StepCost& cost, int32_t most) const {
  if (window_rows == 0) return most;
  // A step of theirs alone is what a piece is measured by.
  if (!cost.window_known()) return 0;
  if (!cost.chunk_known()) return owed_ms_ > 0 ? 0 : std::min(most, kChunk);
  const auto fit = [&](int32_t rows) { return std::min(most, std::max(rows / kChunk * kChunk, kChunk)); };
  const double gap = kGap * cost.window_ms(window_rows);
  int32_t rows = 0;
  if (layers_ == 1) {
    rows = fit(cost.chunk_rows(std::min(max_ms_, gap), most));
  } else {
    const int32_t wanted = (cost.worthwhile_rows(most) + kChunk - 1) / kChunk * kChunk;
    rows = fit(std::min(wanted, cost.chunk_rows(std::min(max_ms_, gap * layers_), most)));
  }
  return layers(window_rows, cost, rows, layers_) > 0 ? rows : 0;
}

int32_t PrefillShare::layers(int32_t window_rows, const StepCost& cost, int32_t rows, int32_t left) const {
  if (window_rows == 0) return left;
  if (!cost.window_known()) return 0;
  const double one = cost_ms(cost, rows, 1);
  // At least one layer, where nothing is owed; a model that cannot be cut has one.
  const int32_t least = owed_ms_ > 0 ? 0 : 1;
  if (one <= 0) return least;
  const double window = cost.window_ms(window_rows);
  const double budget = std::min(kGap * window, ratio_ * window - owed_ms_);
  return static_cast<int32_t>(std::clamp(budget / one, static_cast<double>(least), static_cast<double>(left)));
}

void PrefillShare::ran(double planned_ms, double window_ms, double chunk_ms) {
  if (window_ms <= 0 && chunk_ms > 0) {  // nobody was kept waiting
    owed_ms_ = std::max(owed_ms_ - planned_ms, 0.0);
    return;
  }
  owed_ms_ += chunk_ms - planned_ms - ratio_ * window_ms;
  owed_ms_ = std::max(owed_ms_, -ratio_ * window_ms);  // time that prompts did not want is not saved up
}

}  // namespace glm53
