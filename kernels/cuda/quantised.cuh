// Quantised dense weights (kernels/quantise.h) on the device: codes widened to pairs of bf16 without rounding.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/views.h"
#include "kernels/quantise.h"

namespace glm53::cuda {

struct Quantised {
  const uint8_t* codes;
  const void* scales;  ///< fp8: f32 [out], int4: bf16 [out][in/32]
  int64_t out, in;
  bool fp8;
};

__device__ inline uint32_t as_word(__nv_bfloat162 v) {
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ inline __nv_bfloat162 as_pair(uint32_t v) {
  return reinterpret_cast<const __nv_bfloat162&>(v);
}

/// code_place() for kernels.
__device__ inline int64_t device_place(bool fp8, int64_t i) {
  const int64_t t = i % 8 / 2, e = i % 2, j = i % kQuantGroup / 8;
  return i / kQuantGroup * kQuantGroup + 8 * t + (fp8 ? j / 2 * 4 + j % 2 + 2 * e : j + 4 * e);
}

/// A word of four e4m3 codes: the pairs (bytes 0 and 2) and (bytes 1 and 3). An e4m3 code, moved to the upper bits of a
/// bf16, is its value times 2^-120, subnormal codes too.
__device__ inline void widen_fp8(uint32_t word, uint32_t (&pair)[2]) {
  const __nv_bfloat162 back = as_pair(0x7b807b80U);  // 2^120
  const uint32_t even = ((word << 8) & 0x80008000U) | ((word << 4) & 0x07f007f0U);
  const uint32_t odd = (word & 0x80008000U) | ((word >> 4) & 0x07f007f0U);
  pair[0] = as_word(__hmul2(as_pair(even), back));
  pair[1] = as_word(__hmul2(as_pair(odd), back));
}

/// A word of eight 4-bit codes: the pairs (nibbles j and j + 4), times the group's scale.
__device__ inline void widen_int4(uint32_t word, __nv_bfloat162 scale, uint32_t (&pair)[4]) {
  const __nv_bfloat162 offset = as_pair(0x43084308U);  // 136: a nibble in the lowest bits of 128 is 128 + code
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t raised = ((word >> (4 * j)) & 0x000f000fU) | 0x43004300U;
    pair[j] = as_word(__hmul2(__hsub2(as_pair(raised), offset), scale));
  }
}

/// y = W x + beta y through tensor cores for rows of the window or the chunk family; false where dtype, alignment or
/// size do not fit and nothing was done.
bool quantised_skinny(const Quantised& w, const Matrix& x, const Matrix& y, float beta, cudaStream_t on);
bool quantised_gemm(const Quantised& w, const Matrix& x, const Matrix& y, float beta, cudaStream_t on);

}  // namespace glm53::cuda
