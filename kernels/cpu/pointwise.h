// Scalar functions that several operators share, so that they agree to the bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/weight.h"

namespace glm53::cpu {

inline float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

/// silu(min(gate, limit)) · clamp(up, −limit, limit) (model §6); NaN stays NaN.
inline float swiglu_value(float gate, float up, float limit) {
  const float g = limit < gate ? limit : gate;
  const float u = limit < up ? limit : up < -limit ? -limit : up;
  return g * sigmoid(g) * u;
}

/// y = x · rsqrt(mean(x²) + eps) · weight (none when null or empty); y may be x.
void normalise(const float* x, int64_t n, const Weight* weight, float eps, float* y);

}  // namespace glm53::cpu
