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

constexpr int kWarps = 8, kMaxHeads = 32, kMaxDim = 128;
constexpr int kPad = 32;  // of a row of queries: eight lanes' 16 bytes lie in different banks
constexpr int kLeastSlice = 512, kMostSlice = 8192;  // pools of a block
constexpr int64_t kBlocks = 256;                     // to aim at: each takes a while to begin

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
  if (eight_bit(c)) {  // 128 wide, bf16
    constexpr int kEach = kMaxHeads / kWarps;
    const auto* from = static_cast<const __nv_bfloat16*>(a.query.data) + row * a.query.stride + 4 * lane;
    float v[kEach][4] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int head = min(warp + i * kWarps, static_cast<int>(a.heads) - 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] = __bfloat162float(from[head * dim + j]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int head = warp + i * kWarps;
      hadamard128(v[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        q[head][4 * lane + j] = head < a.heads ? __half_as_ushort(__float2half_rn(v[i][j])) : uint16_t{0};
      }
    }
    return;
  }
  for (int head = warp; head < kMaxHeads; head += kWarps) {
    for (int i = lane; i < dim; i += 32) {
      q[head][i] = head < a.heads ? __bfloat16_as_ushort(__float2bfloat16_rn(at(a.query, row, head * dim + i))) : 0;
    }
  }
}

/// Counts the first digits of a block's scores, for the choice that follows.
__device__ void count_digits(const Select& a, const int* digits) {
  int* const all = a.choices + blockIdx.y * choice_words(a) + kFirstDigits;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < kBins; i += blockDim.x) {
    if (digits[i] != 0) atomicAdd(all + i, digits[i]);
  }
}

/// 16 bytes of a warp's row of keys, in the order of memory, as four pairs.
template <bool kEight>
__device__ uint4 load_keys(const LatentView& c, const uint8_t* keys, int k) {
  if constexpr (kEight) return eight_halves(c, __ldg(reinterpret_cast<const uint2*>(keys + k)));
  return __ldg(reinterpret_cast<const uint4*>(keys + 2 * k));
}

/// Block (slice of pools, row); kSteps·32 values a key.
template <bool kEight, int kSteps>
__global__ void __launch_bounds__(32 * kWarps, 2) score(Rows b, LatentView c, Select a, int slice) {
  __shared__ __align__(16) uint16_t q[kMaxHeads][kMaxDim + kPad];
  __shared__ float weights[kMaxHeads];
  __shared__ int digits[kBins];
  const int64_t row = a.first_row + blockIdx.y;
  const auto begin = static_cast<int>(blockIdx.x) * slice;
  const auto n = static_cast<int>(candidates(b, c, a, row));
  if (begin >= n || (n <= a.top && a.shown.data == nullptr)) return;
  stage_queries(c, a, row, q);
  if (threadIdx.x < kMaxHeads) weights[threadIdx.x] = threadIdx.x < a.heads ? at(a.head_weight, row, threadIdx.x) : 0;
  if (a.choices != nullptr) {
    for (unsigned i = threadIdx.x; i < kBins; i += blockDim.x) digits[i] = 0;
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int g = lane >> 2, t = lane & 3;
  const float scale = rsqrtf(static_cast<float>(c.index_dim)) * rsqrtf(static_cast<float>(a.heads));
  const int per_block = kBlockTokens / c.kpool, seq = b.row_seq[row], last = min(begin + slice, n);
  for (int first = begin + 16 * warp; first < last; first += 16 * kWarps) {
    uint4 rows[kSteps][2];
    float scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int pool = min(first + 8 * h + g, n - 1), in_block = pool % per_block;
      const int64_t block = block_at(b, c, seq, int64_t{pool} * c.kpool);
      const uint8_t* keys = pool_row(c, block, in_block);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) rows[k][h] = load_keys<kEight>(c, keys, 32 * k + 8 * t);
      scales[h] = scale * (kEight ? *pool_scale(c, block, in_block) : 1.0F);
    }
    float acc[kMaxHeads / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 low = rows[k][0], high = rows[k][1];
#pragma unroll
      for (int m = 0; m < kMaxHeads / 8; ++m) {
        const uint4 x = *reinterpret_cast<const uint4*>(&q[8 * m + g][32 * k + 8 * t]);
        if constexpr (kEight) {
          mma_f16(acc[m], low.x, high.x, low.y, high.y, x.x, x.y);
          mma_f16(acc[m], low.z, high.z, low.w, high.w, x.z, x.w);
        } else {
          mma_bf16(acc[m], low.x, high.x, low.y, high.y, x.x, x.y);
          mma_bf16(acc[m], low.z, high.z, low.w, high.w, x.z, x.w);
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
      const int pool = first + 8 * h + g;
      if (t == 0 && pool < n) {
        const float value = total * scales[h];
        a.scores[blockIdx.y * a.most + pool] = value;
        if (a.choices != nullptr) atomicAdd(&digits[ordered(value) >> 21], 1);
      }
    }
  }
  if (a.choices != nullptr) count_digits(a, digits);
}

void launch_bf16(const Rows& b, const LatentView& c, const Select& a, dim3 grid, int slice, cudaStream_t on) {
  switch (c.index_dim / 32) {
    case 1:
      return score<false, 1><<<grid, 32 * kWarps, 0, on>>>(b, c, a, slice);
    case 2:
      return score<false, 2><<<grid, 32 * kWarps, 0, on>>>(b, c, a, slice);
    case 3:
      return score<false, 3><<<grid, 32 * kWarps, 0, on>>>(b, c, a, slice);
    default:
      return score<false, 4><<<grid, 32 * kWarps, 0, on>>>(b, c, a, slice);
  }
}

}  // namespace

bool CudaOps::score_flash(const Rows& b, const LatentView& c, const Select& a, unsigned rows) {
  const bool eight =
      c.format == static_cast<int>(KvFormat::fp8_c528) || c.format == static_cast<int>(KvFormat::int8_c528);
  if (!a.query.bf16 || a.heads > kMaxHeads || c.format == static_cast<int>(KvFormat::f32)) return false;
  if (c.index_dim > kMaxDim || c.index_dim % 32 != 0 || (eight && c.index_dim != kMaxDim)) return false;
  const int64_t wanted = (a.most * rows / kBlocks + kLeastSlice - 1) / kLeastSlice * kLeastSlice;
  const auto slice = static_cast<int>(std::clamp<int64_t>(wanted, kLeastSlice, kMostSlice));
  const dim3 grid(static_cast<unsigned>((a.most + slice - 1) / slice), rows);
  if (eight) {
    score<true, 4><<<grid, 32 * kWarps, 0, stream()>>>(b, c, a, slice);
  } else {
    launch_bf16(b, c, a, grid, slice, stream());
  }
  check(cudaGetLastError(), "index_select");
  return true;
}

}  // namespace glm53::cuda
