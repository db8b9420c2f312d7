// Scores of pooled keys on tensor cores, for bf16 activations (spec model §5.2, runtime §1.4): a warp has 16 pools as
// rows of A, the heads' queries are the columns of B. 8-bit keys become fp16 without loss and meet rotated queries in
// fp16; bf16 keys meet the queries as they are. The heads are added in a fixed order.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/index_select.cuh"
#include "kernels/cuda/latent.cuh"
#include "kernels/cuda/mma.cuh"

namespace glm53::cuda {
namespace {

constexpr int kWarps = 8, kMaxHeads = 32, kMaxDim = 128, kPad = 8;
constexpr int kSlice = 512;  // pools of a block

/// Eight codes, in the order of memory, as fp16.
__device__ uint4 eight_halves(const LatentView& c, uint2 raw) {
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t two = (j < 2 ? raw.x : raw.y) >> (16 * (j & 1)) & 0xffffU;
    if (c.format == static_cast<int>(KvFormat::fp8_c528)) {
      const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
      words[j] = uint32_t{h.x} | uint32_t{h.y} << 16;
    } else {
      const __half2 h = __floats2half2_rn(static_cast<float>(static_cast<int8_t>(two & 255U)),
                                          static_cast<float>(static_cast<int8_t>(two >> 8)));
      words[j] = reinterpret_cast<const uint32_t&>(h);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

/// The row's queries as 16-bit values: rotated fp16 for 8-bit keys, bf16 otherwise; zeros for heads that are none.
__device__ void stage_queries(const LatentView& c, const Select& a, int64_t row, uint16_t (*q)[kMaxDim + kPad]) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int dim = c.index_dim;
  for (int head = warp; head < kMaxHeads; head += kWarps) {
    if (eight_bit(c)) {  // 128 wide
      float v[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = head < a.heads ? at(a.query, row, head * dim + 4 * lane + j) : 0.0F;
      hadamard128(v);
#pragma unroll
      for (int j = 0; j < 4; ++j) q[head][4 * lane + j] = __half_as_ushort(__float2half_rn(v[j]));
      continue;
    }
    for (int i = lane; i < dim; i += 32) {
      q[head][i] = head < a.heads ? __bfloat16_as_ushort(__float2bfloat16_rn(at(a.query, row, head * dim + i))) : 0;
    }
  }
}

/// Block (slice of pools, row).
template <bool kEight>
__global__ void __launch_bounds__(32 * kWarps) score(Rows b, LatentView c, Select a) {
  __shared__ __align__(16) uint16_t q[kMaxHeads][kMaxDim + kPad];
  __shared__ float weights[kMaxHeads];
  const int64_t row = a.first_row + blockIdx.y, begin = int64_t{blockIdx.x} * kSlice;
  const int64_t n = candidates(b, c, a, row);
  if (begin >= n || (n <= a.top && a.shown.data == nullptr)) return;
  stage_queries(c, a, row, q);
  if (threadIdx.x < kMaxHeads) weights[threadIdx.x] = threadIdx.x < a.heads ? at(a.head_weight, row, threadIdx.x) : 0;
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int g = lane >> 2, t = lane & 3;
  const float scale = rsqrtf(static_cast<float>(c.index_dim)) * rsqrtf(static_cast<float>(a.heads));
  const int64_t per_block = kBlockTokens / c.kpool;
  for (int64_t first = begin + 16 * warp; first < min(begin + kSlice, n); first += 16 * kWarps) {
    const uint8_t* keys[2];
    float scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t pool = min(first + 8 * h + g, n - 1), block = block_at(b, c, b.row_seq[row], pool * c.kpool);
      keys[h] = pool_row(c, block, pool % per_block);
      scales[h] = scale * (kEight ? *pool_scale(c, block, pool % per_block) : 1.0F);
    }
    float acc[kMaxHeads / 8][4] = {};
    for (int k = 8 * t; k < c.index_dim; k += 32) {
      uint4 rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows[h] = kEight ? eight_halves(c, *reinterpret_cast<const uint2*>(keys[h] + k))
                         : *reinterpret_cast<const uint4*>(keys[h] + 2 * k);
      }
#pragma unroll
      for (int m = 0; m < kMaxHeads / 8; ++m) {
        const uint4 x = *reinterpret_cast<const uint4*>(&q[8 * m + g][k]);
        if constexpr (kEight) {
          mma_f16(acc[m], rows[0].x, rows[1].x, rows[0].y, rows[1].y, x.x, x.y);
          mma_f16(acc[m], rows[0].z, rows[1].z, rows[0].w, rows[1].w, x.z, x.w);
        } else {
          mma_bf16(acc[m], rows[0].x, rows[1].x, rows[0].y, rows[1].y, x.x, x.y);
          mma_bf16(acc[m], rows[0].z, rows[1].z, rows[0].w, rows[1].w, x.z, x.w);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = 0;
#pragma unroll
      for (int m = 0; m < kMaxHeads / 8; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) total = fmaf(weights[8 * m + 2 * t + i], fmaxf(acc[m][2 * h + i], 0.0F), total);
      }
      total += __shfl_xor_sync(0xffffffffU, total, 1);
      total += __shfl_xor_sync(0xffffffffU, total, 2);
      const int64_t pool = first + 8 * h + g;
      if (t == 0 && pool < n) a.scores[blockIdx.y * a.most + pool] = total * scales[h];
    }
  }
}

}  // namespace

bool CudaOps::score_flash(const Rows& b, const LatentView& c, const Select& a, unsigned rows) {
  const bool eight =
      c.format == static_cast<int>(KvFormat::fp8_c528) || c.format == static_cast<int>(KvFormat::int8_c528);
  if (!a.query.bf16 || a.heads > kMaxHeads || c.format == static_cast<int>(KvFormat::f32)) return false;
  if (c.index_dim > kMaxDim || c.index_dim % 32 != 0 || (eight && c.index_dim != kMaxDim)) return false;
  const dim3 grid(static_cast<unsigned>((a.most + kSlice - 1) / kSlice), rows);
  if (eight) {
    score<true><<<grid, 32 * kWarps, 0, stream()>>>(b, c, a);
  } else {
    score<false><<<grid, 32 * kWarps, 0, stream()>>>(b, c, a);
  }
  check(cudaGetLastError(), "index_select");
  return true;
}

}  // namespace glm53::cuda
