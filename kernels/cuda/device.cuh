// What kernels share: loads and stores of either dtype, and sums of fixed order.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/views.h"

namespace glm53::cuda {

__device__ inline float load(const void* p, bool bf16, int64_t i) {
  return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]) : static_cast<const float*>(p)[i];
}
__device__ inline void store(void* p, bool bf16, int64_t i, float v) {
  if (bf16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  } else {
    static_cast<float*>(p)[i] = v;
  }
}
__device__ inline float at(const Matrix& m, int64_t row, int64_t column) {
  return load(m.data, m.bf16, row * m.stride + column);
}
__device__ inline void put(const Matrix& m, int64_t row, int64_t column, float v) {
  store(m.data, m.bf16, row * m.stride + column, v);
}
__device__ inline float at(const Plain& w, int64_t i) {
  return load(w.data, w.bf16, i);
}

__device__ inline float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}
__device__ inline float swiglu_value(float gate, float up, float limit) {
  const float g = limit < gate ? limit : gate;
  const float u = limit < up ? limit : up < -limit ? -limit : up;
  return g * sigmoid(g) * u;
}

/// Sum over the lanes, the same bits in every lane; the tree is fixed.
__device__ inline float warp_sum(float v) {
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xffffffffU, v, d);
  return v;
}
/// Sum over the block (whole warps, at most 32), the same bits in every thread; warps are added in order. `room` holds
/// 32 values. Every thread must call it.
__device__ inline float block_sum(float v, float* room) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31U) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  float total = 0;
  for (unsigned w = 0; w < (blockDim.x + 31U) / 32U; ++w) total += room[w];
  return total;
}

/// Orthonormal Hadamard transform of 128 shared values by 128 threads of a block; `t` is the thread's number among
/// them, and all threads of the block call it together.
__device__ inline void hadamard128(float* v, unsigned t, bool active) {
  for (unsigned half = 1; half < 128; half *= 2) {
    __syncthreads();
    float r = 0;
    if (active) {
      const float mine = v[t], other = v[t ^ half];
      r = (t & half) == 0 ? mine + other : other - mine;
    }
    __syncthreads();
    if (active) v[t] = r;
  }
  __syncthreads();
  if (active) v[t] *= 0.08838834764831845F;
  __syncthreads();
}

/// Orthonormal Hadamard transform of 128 values held by a warp, four neighbours a lane.
__device__ inline void hadamard128(float (&v)[4]) {
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c;
  v[1] = b + d;
  v[2] = a - c;
  v[3] = b - d;
  const auto lane = threadIdx.x & 31U;
#pragma unroll
  for (unsigned half = 1; half < 32; half *= 2) {
#pragma unroll
    for (float& mine : v) {
      const float other = __shfl_xor_sync(0xffffffffU, mine, half);
      mine = (lane & half) == 0 ? mine + other : other - mine;
    }
  }
#pragma unroll
  for (float& mine : v) mine *= 0.08838834764831845F;
}

__device__ inline bool padding_row(const Rows& b, int64_t row) {
  return row >= b.rows || b.slot[b.row_seq[row]] < 0;
}
/// Block that holds a position, 0 ("nowhere") when the table does not reach it.
__device__ inline int64_t block_at(const Rows& b, const LatentView& c, int64_t seq, int64_t position) {
  const int64_t index = position / kBlockTokens;
  if (index >= b.max_blocks) return 0;
  const int64_t block = b.table[seq * b.table_stride + index];
  return block < 0 || block >= c.blocks ? 0 : block;
}

}  // namespace glm53::cuda
