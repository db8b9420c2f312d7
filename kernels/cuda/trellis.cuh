// Decoding of 4-bit MCG trellises straight into tensor-core fragments (spec exl3 §1.4–1.6, §2), and what surrounds it:
// the rotation of 128 values by one warp, the order of activations in fragments, and their scale.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#include "kernels/cuda/device.cuh"

namespace glm53::cuda {

/// The codebook's mask and constant. From memory, because the one instruction that applies both takes only one of them
/// as an immediate: with two the compiler makes two instructions of it, of the kind that decoding is bound by.
struct McgConstants {
  uint32_t mask, flip;
};
static __constant__ McgConstants mcg_constants = {0x8fff8fffU, 0x3b603b60U};

/// Values of the states s0 (low half) and s1 of the MCG codebook.
__device__ inline uint32_t mcg_pair(uint32_t s0, uint32_t s1) {
  const uint32_t mask = mcg_constants.mask, flip = mcg_constants.flip;
  const uint32_t q0 = (s0 * 0xcbac1fedU & mask) ^ flip, q1 = (s1 * 0xcbac1fedU & mask) ^ flip;
  // Adding the halves in place keeps half of the packing off the integer pipe, which is what decoding is bound by.
  const __half2 h0 = reinterpret_cast<const __half2&>(q0), h1 = reinterpret_cast<const __half2&>(q1);
  const __half2 sum = __halves2half2(__hadd(__low2half(h0), __high2half(h0)), __hadd(__low2half(h1), __high2half(h1)));
  return reinterpret_cast<const uint32_t&>(sum);
}

/// The 8 weights of lane L of a 16×16 tile of 4-bit codes: `word` is W[L], `before` W[(L−1) mod 32]. a[0..3] is the A
/// fragment of Ŵᵀ (16 outputs × 16 inputs) for m16n8k16.
__device__ inline void decode_tile4(uint32_t before, uint32_t word, uint32_t (&a)[4]) {
  const uint32_t s = __funnelshift_r(word, before, 20), s4 = s >> 4, w4 = word >> 4;
  a[0] = mcg_pair(__byte_perm(s, 0, 0x4421), s4 & 0xffffU);
  a[2] = mcg_pair(s & 0xffffU, word >> 16);
  a[1] = mcg_pair(__byte_perm(w4, 0, 0x4421), __byte_perm(word, 0, 0x4421));
  a[3] = mcg_pair(w4 & 0xffffU, word & 0xffffU);
}

/// Where value i of a row lies so that a lane's four inputs of a 16-wide step, {2q, 2q+1, 2q+8, 2q+9}, are neighbours.
/// Pairs (i even, i+1) stay together.
__device__ inline int64_t fragment_place(int64_t i) {
  const int64_t k = i & 15;
  return (i & ~int64_t{15}) + ((k & 7) << 1) + ((k & 8) >> 2);
}

/// Stores four neighbours, from i on, in fragment order.
__device__ inline void store_four(__half* row, int64_t i, const float (&v)[4], float scale) {
  *reinterpret_cast<__half2*>(row + fragment_place(i)) = __floats2half2_rn(v[0] * scale, v[1] * scale);
  *reinterpret_cast<__half2*>(row + fragment_place(i + 2)) = __floats2half2_rn(v[2] * scale, v[3] * scale);
}

/// Four neighbours of a row of fp16.
__device__ inline float4 halves(const void* p, int64_t i) {
  const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __half*>(p) + i);
  const float2 a = __half22float2(reinterpret_cast<const __half2&>(raw.x));
  const float2 b = __half22float2(reinterpret_cast<const __half2&>(raw.y));
  return {a.x, a.y, b.x, b.y};
}
/// Four neighbours of a row of bf16.
__device__ inline float4 four(const Matrix& m, int64_t row, int64_t i) {
  const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(m.data) + row * m.stride + i);
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000U), __uint_as_float(raw.y << 16),
          __uint_as_float(raw.y & 0xffff0000U)};
}
/// The largest magnitude of v and top; and of all lanes.
__device__ inline float largest(const float (&v)[4], float top) {
  return fmaxf(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))), top);
}
__device__ inline float warp_top(float top) {
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, d));
  return top;
}

/// The power of two that brings a row whose largest magnitude is `top` near the end of fp16's range, so that none of
/// its values is lost below it; 1 for rows of zeros and for rows that are not finite.
__device__ inline float fp16_scale(float top) {
  const int exponent = static_cast<int>(__float_as_uint(top) >> 23) - 127;
  if (top == 0 || exponent > 127) return 1;
  return __uint_as_float(static_cast<uint32_t>(127 + min(14 - exponent, 126)) << 23);
}

/// fp16_scale of a row that a block of kWarps warps holds: block b of 128 values lies in warp b % kWarps at b / kWarps.
/// Every thread of the block calls it.
template <int kWarps, int kPerWarp>
__device__ inline float row_scale(const float (&v)[kPerWarp][4], int64_t width) {
  __shared__ float tops[kWarps];
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  float top = 0;
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    if ((b * kWarps + warp) * 128 < width) top = largest(v[b], top);
  }
  top = warp_top(top);
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (const float other : tops) top = fmaxf(top, other);
  return fp16_scale(top);
}

}  // namespace glm53::cuda
