// The quantised formats of dense weights: fp8_row and int4_g32. What a code means, where it lies, and how a bf16 or f32
// weight becomes one. Every quantised weight is exactly a bf16 value (with the scales that quantise_rows chooses), so
// kernels may widen codes to bf16 without another rounding.
//
// fp8_row   w = e4m3(code) · scale[o]. codes e4m3 [out, in], scales f32 [out]. quantise_rows takes the least power of
// two
//           with which no value saturates: |error| ≤ 1/16 of the value, or scale/1024 near zero; about 2.6% rms for
//           normal weights. 8 bits a weight.
// int4_g32  w = (code − 8) · scale[o][i/32]. codes u8 [out, in/2], scales bf16 [out, in/32] with at most five
// significant
//           bits (times a code of four bits that is exact in bf16). quantise_rows tries scales near the least that
//           reaches the group's extreme, either sign, and keeps the one of the smallest squared error; |error| ≤ half a
//           scale, or what an extreme loses where clipping it is better; about 8% rms for normal weights. 4.5 bits.
//
// Both need `in` to be a multiple of 32. Inside each 32 inputs, codes lie in the order of tensor-core fragments (so a
// thread finds the codes of its inputs in one word): code_place().
#pragma once

#include <cstdint>

#include "kernels/weight.h"

namespace glm53 {

inline constexpr int64_t kQuantGroup = 32;  ///< inputs whose codes are permuted among themselves; a group of int4_g32

constexpr bool is_quantised(WeightFormat f) {
  return f == WeightFormat::fp8_row || f == WeightFormat::int4_g32;
}

/// Where the code of input i lies in its row, counted in codes (int4: two a byte, the lower half first). Input
/// i = 32n + 8j + 2t + e goes to n·32 + 8t + (fp8: 4(j/2) + j%2 + 2e; int4: j + 4e).
constexpr int64_t code_place(WeightFormat f, int64_t i) {
  const int64_t t = i % 8 / 2, e = i % 2, j = i % kQuantGroup / 8;
  return i / kQuantGroup * kQuantGroup + 8 * t + (f == WeightFormat::fp8_row ? j / 2 * 4 + j % 2 + 2 * e : j + 4 * e);
}

/// Bytes of the codes and of the scales of an [out, in] weight.
constexpr int64_t code_bytes(WeightFormat f, int64_t out, int64_t in) {
  return f == WeightFormat::fp8_row ? out * in : out * in / 2;
}
constexpr int64_t scale_bytes(WeightFormat f, int64_t out, int64_t in) {
  return f == WeightFormat::fp8_row ? out * 4 : out * (in / kQuantGroup) * 2;
}

/// A weight of format f whose codes and scales lie at these addresses. Throws Error(unavailable) unless f is quantised
/// and `in` a multiple of 32.
Weight quantised_weight(WeightFormat f, int64_t out, int64_t in, void* codes, void* scales, Place place);

/// Quantises `rows` rows of `in` values into codes (code_bytes) and scales (scale_bytes). Rows do not depend on one
/// another: a caller may share them among threads. Throws Error(weights) for a value that is not finite, or too large
/// or small for the format, and as quantised_weight does.
void quantise_rows(WeightFormat f, const float* values, int64_t rows, int64_t in, void* codes, void* scales);

/// The values of one row of a quantised weight in host memory.
void dequantise_row(const Weight& w, int64_t row, float* values);

}  // namespace glm53
