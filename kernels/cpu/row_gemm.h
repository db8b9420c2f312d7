// The small dense product of the attention operators. Element (r, c) depends on row r of a and column c of b alone and
// adds its products in ascending order of the inner index, whatever the tile: neither the number of rows nor the
// vector width changes a bit.
#pragma once

#include <cstdint>
#include <span>

namespace glm53::cpu {

/// A row-major matrix view; `stride` counts values between rows.
struct ConstMatrix {
  const float* data;
  int64_t stride;
};
struct Matrix {
  float* data;
  int64_t stride;
};

/// c[rows][cols] (+)= a[rows][inner] · b[inner][cols].
void row_gemm(ConstMatrix a, ConstMatrix b, Matrix c, int64_t rows, int64_t inner, int64_t cols, bool add);

/// The same with the rows of b anywhere; their number is the inner size.
void row_gemm(ConstMatrix a, std::span<const float* const> b, Matrix c, int64_t rows, int64_t cols, bool add);
/// c[r][j] = dot(a[r], b[j]) for rows of n values; each b[j] is read once for four rows of a.
void row_dots(ConstMatrix a, std::span<const float* const> b, Matrix c, int64_t rows, int64_t n);

/// Σ x[i]·y[i] with a fixed order (16 partial sums, then their tree).
float dot(const float* x, const float* y, int64_t n);
/// Σ x[i] in the same order.
float sum(const float* x, int64_t n);

}  // namespace glm53::cpu
