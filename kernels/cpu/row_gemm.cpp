#include "kernels/cpu/row_gemm.h"

#include <cstring>

#include "kernels/cpu/clones.h"

namespace glm53::cpu {
namespace {

constexpr int kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

[[gnu::always_inline]] inline void load(Lanes& v, const float* from) {
  std::memcpy(&v, from, sizeof v);
}

// Rows r … r+R-1 of one column tile. Unrolled, or the sums would live in memory.
template <int R>
[[gnu::always_inline]] inline void tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                                        int64_t inner, bool add) {
  Lanes acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (add) {
      load(acc[r], c + r * ldc);
    } else {
      acc[r] = Lanes{};
    }
  }
  for (int64_t k = 0; k < inner; ++k) {
    Lanes row;
    load(row, b + k * ldb);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] += a[r * lda + k] * row;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) std::memcpy(c + r * ldc, &acc[r], sizeof(Lanes));
}

[[gnu::always_inline]] inline void edge(ConstMatrix a, ConstMatrix b, Matrix c, int64_t rows, int64_t inner,
                                        int64_t from, int64_t cols, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = from; j < cols; ++j) {
      float acc = add ? c.data[r * c.stride + j] : 0.0F;
      for (int64_t k = 0; k < inner; ++k) acc += a.data[r * a.stride + k] * b.data[k * b.stride + j];
      c.data[r * c.stride + j] = acc;
    }
  }
}

}  // namespace

GLM53_CLONES void row_gemm(ConstMatrix a, ConstMatrix b, Matrix c, int64_t rows, int64_t inner, int64_t cols,
                           bool add) {
  int64_t j = 0;
  for (; j + kLanes <= cols; j += kLanes) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      tile<4>(a.data + r * a.stride, a.stride, b.data + j, b.stride, c.data + r * c.stride + j, c.stride, inner, add);
    }
    for (; r < rows; ++r) {
      tile<1>(a.data + r * a.stride, a.stride, b.data + j, b.stride, c.data + r * c.stride + j, c.stride, inner, add);
    }
  }
  edge(a, b, c, rows, inner, j, cols, add);
}

GLM53_CLONES float dot(const float* x, const float* y, int64_t n) {
  Lanes acc{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes u, v;
    load(u, x + i);
    load(v, y + i);
    acc += u * v;
  }
  float part[kLanes];
  std::memcpy(part, &acc, sizeof part);
  for (int lane = 0; i < n; ++i, ++lane) part[lane] += x[i] * y[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

GLM53_CLONES float sum(const float* x, int64_t n) {
  Lanes acc{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes u;
    load(u, x + i);
    acc += u;
  }
  float part[kLanes];
  std::memcpy(part, &acc, sizeof part);
  for (int lane = 0; i < n; ++i, ++lane) part[lane] += x[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

}  // namespace glm53::cpu
