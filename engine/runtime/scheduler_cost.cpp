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
constexpr double kGap = 2;       // a piece takes at most so many times as long as the step it runs beside

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
  const double spread = xx_ / weight_ - mean_x * mean_x;
  // Observations at (nearly) one x say nothing of a slope: through the origin then.
  slope = spread > 1e-3 * mean_x * mean_x ? (xy_ / weight_ - mean_x * mean_y) / spread : mean_y / std::max(mean_x, 1.0);
  slope = std::clamp(slope, 0.0, mean_x > 0 ? mean_y / mean_x : 0.0);
  base = mean_y - slope * mean_x;
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

int32_t StepCost::chunk_rows(double ms, int32_t most) const {
  if (!chunk_.known()) return 0;
  return static_cast<int32_t>(std::min(chunk_.reach(ms), static_cast<double>(most)));
}

PrefillShare::PrefillShare(double share, double max_ms) : ratio_(share / (1 - share)), max_ms_(max_ms) {
  if (!(share > 0) || !(share < 1) || !(max_ms > 0))
    throw Error(Code::config, cat("sched.prefill_share is ", share, ", sched.max_step ", max_ms, " ms"),
                "a share between 0 and 1, and a positive time");
}

int32_t PrefillShare::rows(int32_t window_rows, const StepCost& cost, int32_t most) const {
  if (window_rows == 0) return most;
  // A step of theirs alone is what a piece is measured by.
  if (owed_ms_ > 0 || !cost.window_known()) return 0;
  if (!cost.chunk_known()) return std::min(most, kChunk);
  const double budget = std::min(max_ms_, kGap * cost.window_ms(window_rows));
  return std::min(most, std::max(cost.chunk_rows(budget, most) / kChunk * kChunk, kChunk));
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
