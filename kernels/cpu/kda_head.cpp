#include "kernels/cpu/kda_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/kda_rows.h"
#include "kernels/cpu/row_gemm.h"

namespace glm53::cpu {
namespace {

constexpr float kNormEps = 1e-6F;
using Lanes = float __attribute__((vector_size(kWindowColumns * sizeof(float))));

// One row ready for the recurrence; v and out point at the first column of the tile.
struct Terms {
  const float *q, *k, *decay;  // q null: no output
  float beta;
  const float* v;
  float* out;
};

// Decay, delta, read (model §4) of one row on `width` columns; tile is [dim][kWindowColumns]. Columns do not meet.
GLM53_CLONES void step(float* tile, int dim, const Terms& t, int width) {
  Lanes predicted{}, s;
  for (int a = 0; a < dim; ++a) {
    float* row = tile + a * kWindowColumns;
    std::memcpy(&s, row, sizeof s);
    s *= t.decay[a];
    std::memcpy(row, &s, sizeof s);
    predicted += t.k[a] * s;
  }
  Lanes delta{}, read{};
  std::memcpy(&delta, t.v, static_cast<size_t>(width) * sizeof(float));
  delta = t.beta * (delta - predicted);
  if (t.q == nullptr) {
    for (int a = 0; a < dim; ++a) {
      float* row = tile + a * kWindowColumns;
      std::memcpy(&s, row, sizeof s);
      s += t.k[a] * delta;
      std::memcpy(row, &s, sizeof s);
    }
    return;
  }
  for (int a = 0; a < dim; ++a) {
    float* row = tile + a * kWindowColumns;
    std::memcpy(&s, row, sizeof s);
    s += t.k[a] * delta;
    std::memcpy(row, &s, sizeof s);
    read += t.q[a] * s;
  }
  std::memcpy(t.out, &read, static_cast<size_t>(width) * sizeof(float));
}

void copy_columns(const float* from, int64_t from_stride, float* to, int64_t to_stride, int rows, int width) {
  if (width == kWindowColumns) {  // a size known here is a few moves instead of a call a row
    for (int a = 0; a < rows; ++a) std::memcpy(to + a * to_stride, from + a * from_stride, sizeof(Lanes));
    return;
  }
  for (int a = 0; a < rows; ++a) {
    std::memcpy(to + a * to_stride, from + a * from_stride, static_cast<size_t>(width) * sizeof(float));
  }
}

// Scratch of run_window, a row each: normalised k, normalised q, decay, then β of all rows, then the tile.
struct WindowScratch {
  WindowScratch(float* at, int dim, int rows)
      : k(at), q(k + rows * dim), decay(q + rows * dim), beta(decay + rows * dim), tile(beta + rows) {}
  float *k, *q, *decay, *beta, *tile;
};

void prepare(const HeadRows& rows, const HeadGate& gate, int dim, WindowScratch at) {
  const float scale = q_scale(dim);
  for (int i = 0; i < rows.rows; ++i) {
    l2_normalise(rows.k + i * rows.stride, dim, 1.0F, at.k + i * dim);
    if (rows.q != nullptr) l2_normalise(rows.q + i * rows.stride, dim, scale, at.q + i * dim);
    float* decay = at.decay + i * dim;
    log_decay(rows.gate + i * rows.gate_stride, gate, dim, decay);
    for (int a = 0; a < dim; ++a) decay[a] = std::exp(decay[a]);
    at.beta[i] = sigmoid(rows.beta[i * rows.beta_stride]);
  }
}

void run_rows(const HeadRows& rows, int dim, const WindowScratch& at, float* tile, int column, int width) {
  for (int i = 0; i < rows.rows; ++i) {
    Terms t{};
    t.k = at.k + i * dim;
    t.decay = at.decay + i * dim;
    t.beta = at.beta[i];
    t.v = rows.v + i * rows.stride + column;
    if (rows.q != nullptr) {
      t.q = at.q + i * dim;
      t.out = rows.out + i * rows.out_stride + column;
    }
    step(tile, dim, t, width);
  }
}

}  // namespace

float q_scale(int dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
}

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

void l2_normalise(const float* x, int dim, float scale, float* y) {
  const float r = scale / std::sqrt(dot(x, x, dim) + kNormEps);
  for (int a = 0; a < dim; ++a) y[a] = x[a] * r;
}

void log_decay(const float* raw, const HeadGate& gate, int dim, float* g) {
  const float rate = std::exp(gate.a_log);
  for (int a = 0; a < dim; ++a) g[a] = gate.lower * sigmoid(rate * (raw[a] + gate.dt_bias[a]));
}

int64_t window_scratch(int dim, int rows) {
  return int64_t{rows} * (3 * dim + 1) + int64_t{dim} * kWindowColumns;
}

void run_window(const HeadRows& replay, const HeadRows& window, const HeadGate& gate, int dim, float* state,
                float* scratch) {
  const WindowScratch at(scratch, dim, replay.rows + window.rows);
  WindowScratch fresh = at;  // the window's part of each array
  fresh.k += replay.rows * dim;
  fresh.q += replay.rows * dim;
  fresh.decay += replay.rows * dim;
  fresh.beta += replay.rows;
  prepare(replay, gate, dim, at);
  prepare(window, gate, dim, fresh);
  for (int column = 0; column < dim; column += kWindowColumns) {
    const int width = std::min(kWindowColumns, dim - column);
    if (width < kWindowColumns) std::fill_n(at.tile, dim * kWindowColumns, 0.0F);
    copy_columns(state + column, dim, at.tile, kWindowColumns, dim, width);
    run_rows(replay, dim, at, at.tile, column, width);
    if (replay.rows > 0) copy_columns(at.tile, kWindowColumns, state + column, dim, dim, width);
    run_rows(window, dim, fresh, at.tile, column, width);
  }
}

}  // namespace glm53::cpu
