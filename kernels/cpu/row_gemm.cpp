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
// b(k): row k of the right side, from the tile's first column on.
template <int R, class B>
[[gnu::always_inline]] inline void tile(const float* a, int64_t lda, B b, float* c, int64_t ldc, int64_t inner,
                                        bool add) {
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
    load(row, b(k));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] += a[r * lda + k] * row;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) std::memcpy(c + r * ldc, &acc[r], sizeof(Lanes));
}

template <class B>
[[gnu::always_inline]] inline void edge(ConstMatrix a, B b, Matrix c, int64_t rows, int64_t inner, int64_t from,
                                        int64_t cols, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = from; j < cols; ++j) {
      float acc = add ? c.data[r * c.stride + j] : 0.0F;
      for (int64_t k = 0; k < inner; ++k) acc += a.data[r * a.stride + k] * b(k)[j];
      c.data[r * c.stride + j] = acc;
    }
  }
}

template <class B>
[[gnu::always_inline]] inline void gemm(ConstMatrix a, B b, Matrix c, int64_t rows, int64_t inner, int64_t cols,
                                        bool add) {
  int64_t j = 0;
  for (; j + kLanes <= cols; j += kLanes) {
    const auto column = [&](int64_t k) { return b(k) + j; };
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      tile<4>(a.data + r * a.stride, a.stride, column, c.data + r * c.stride + j, c.stride, inner, add);
    for (; r + 2 <= rows; r += 2)
      tile<2>(a.data + r * a.stride, a.stride, column, c.data + r * c.stride + j, c.stride, inner, add);
    for (; r < rows; ++r)
      tile<1>(a.data + r * a.stride, a.stride, column, c.data + r * c.stride + j, c.stride, inner, add);
  }
  edge(a, b, c, rows, inner, j, cols, add);
}

// The tree of sixteen partial sums.
[[gnu::always_inline]] inline float tree(const Lanes& acc) {
  float part[kLanes];
  std::memcpy(part, &acc, sizeof part);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

// Values behind the last whole vector go to the first lanes.
[[gnu::always_inline]] inline void dot_tail(Lanes& acc, const float* x, const float* y, int64_t from, int64_t n) {
  if (from == n) return;
  float part[kLanes];
  std::memcpy(part, &acc, sizeof part);
  for (int lane = 0; from < n; ++from, ++lane) part[lane] += x[from] * y[from];
  std::memcpy(&acc, part, sizeof part);
}

template <int R>
[[gnu::always_inline]] inline void dots_of(ConstMatrix a, int64_t row, const float* y, int64_t n, Matrix c,
                                           int64_t col) {
  Lanes acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = Lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes v;
    load(v, y + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Lanes u;
      load(u, a.data + (row + r) * a.stride + i);
      acc[r] += u * v;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    dot_tail(acc[r], a.data + (row + r) * a.stride, y, i, n);
    c.data[(row + r) * c.stride + col] = tree(acc[r]);
  }
}

}  // namespace

GLM53_CLONES void row_gemm(ConstMatrix a, ConstMatrix b, Matrix c, int64_t rows, int64_t inner, int64_t cols,
                           bool add) {
  gemm(
      a, [b](int64_t k) { return b.data + k * b.stride; }, c, rows, inner, cols, add);
}

GLM53_CLONES void row_gemm(ConstMatrix a, std::span<const float* const> b, Matrix c, int64_t rows, int64_t cols,
                           bool add) {
  const auto row = [from = b.data()](int64_t k) { return from[k]; };
  gemm(a, row, c, rows, static_cast<int64_t>(b.size()), cols, add);
}

GLM53_CLONES void row_dots(ConstMatrix a, std::span<const float* const> b, Matrix c, int64_t rows, int64_t n) {
  for (size_t j = 0; j < b.size(); ++j) {
    const auto column = static_cast<int64_t>(j);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) dots_of<4>(a, r, b[j], n, c, column);
    for (; r + 2 <= rows; r += 2) dots_of<2>(a, r, b[j], n, c, column);
    for (; r < rows; ++r) dots_of<1>(a, r, b[j], n, c, column);
  }
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
  dot_tail(acc, x, y, i, n);
  return tree(acc);
}

GLM53_CLONES float sum(const float* x, int64_t n) {
  Lanes acc{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes u;
    load(u, x + i);
    acc += u;
  }
  if (i < n) {
    float part[kLanes];
    std::memcpy(part, &acc, sizeof part);
    for (int lane = 0; i < n; ++i, ++lane) part[lane] += x[i];
    std::memcpy(&acc, part, sizeof part);
  }
  return tree(acc);
}

}  // namespace glm53::cpu
