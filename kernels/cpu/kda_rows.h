// Row maths shared by the two KDA families.
#pragma once

#include "kernels/cpu/kda_head.h"

namespace glm53::cpu {

/// dim^-0.5, the scale of a normalised query.
float q_scale(int dim);
float sigmoid(float x);
/// y = scale · x / sqrt(Σ x² + 1e-6).
void l2_normalise(const float* x, int dim, float scale, float* y);
/// g[a] = lower · σ(exp(a_log) · (raw[a] + dt_bias[a])).
void log_decay(const float* raw, const HeadGate& gate, int dim, float* g);

}  // namespace glm53::cpu
