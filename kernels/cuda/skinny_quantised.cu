// linear for few rows (the window family) with fp8 or 4-bit weights and bf16 activations: as `skinny`, codes go from
// memory straight into tensor-core fragments, here by way of registers that widen them. A block owns 16·kMt outputs;
// its warps take the steps of inputs in turn and their sums are added in warp order, so no bit of a row depends on how
// many rows there are.
//
// A step is 64 bytes of a row's codes, 16 a thread; which inputs those are follows from code_place(): at fp8 chunks
// 2(t % 2) and the next of group t / 2, at 4 bits all of group t.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/quantised.cuh"

namespace glm53::cuda {
namespace {

struct Job {
  const uint8_t* codes;
  const void* scales;
  const __nv_bfloat16* x;
  int64_t out, in, x_stride;
  Matrix y;
  float beta;
  int rows;
};

constexpr int kStepBytes = 64;
template <bool kFp8>
constexpr int kStepInputs = kFp8 ? 64 : 128;

/// What a warp reads of the weights in one step: 16 bytes of each of 2·kMt outputs, and their scales.
template <bool kFp8, int kMt>
struct Codes {
  uint4 raw[2 * kMt];
  __nv_bfloat162 scale[2 * kMt];

  __device__ void read(const uint8_t* const (&codes)[2 * kMt], const __nv_bfloat16* const (&scales)[2 * kMt],
                       int64_t step) {
#pragma unroll
    for (int m = 0; m < 2 * kMt; ++m) raw[m] = load_once(reinterpret_cast<const uint4*>(codes[m] + step * kStepBytes));
    if constexpr (!kFp8) {
#pragma unroll
      for (int m = 0; m < 2 * kMt; ++m) scale[m] = __bfloat162bfloat162(__ldg(scales[m] + step * 4));
    }
  }
};

__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// acc += one step. `x` points to this thread's inputs of the step in column g.
template <bool kFp8, int kTiles, int kMt>
__device__ void multiply_step(const Codes<kFp8, kMt>& w, const __nv_bfloat16* x, int64_t x_stride, int rows, int g,
                              float (&acc)[kMt][kTiles][4]) {
  constexpr int kWords = kFp8 ? 2 : 4;  // of x, eight inputs apart: pairs that this thread needs
  uint32_t b[kTiles][4][kWords];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const bool live = 8 * n + g < rows;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat16* from = x + 8 * n * x_stride + 8 * j;
      if constexpr (kFp8) {
        const uint2 v = live ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{};
        b[n][j][0] = v.x;
        b[n][j][1] = v.y;
      } else {
        const uint4 v = live ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n][j][i] = word_of(v, i);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kMt; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFp8) {  // word i: chunk i / 2, pairs 2(i % 2) and the next
        uint32_t low[2], high[2];
        widen_fp8(word_of(w.raw[2 * m], i), low);
        widen_fp8(word_of(w.raw[2 * m + 1], i), high);
        const int j = i % 2 * 2;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_bf16(acc[m][n], low[0], high[0], low[1], high[1], b[n][j][i / 2], b[n][j + 1][i / 2]);
        }
      } else {
        uint32_t low[4], high[4];
        widen_int4(word_of(w.raw[2 * m], i), w.scale[2 * m], low);
        widen_int4(word_of(w.raw[2 * m + 1], i), w.scale[2 * m + 1], high);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_bf16(acc[m][n], low[0], high[0], low[1], high[1], b[n][0][i], b[n][1][i]);
          mma_bf16(acc[m][n], low[2], high[2], low[3], high[3], b[n][2][i], b[n][3][i]);
        }
      }
    }
  }
}

template <bool kFp8, int kTiles, int kMt, int kWarps, int kUnroll>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 && kTiles == 1 ? 3 : 1) skinny_quantised(Job job) {
  constexpr int kOut = 16 * kMt, kCols = 8 * kTiles, kInputs = kStepInputs<kFp8>;
  __shared__ float sums[kWarps][kOut][kCols + 1];
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2, t = lane & 3;
  const int64_t first = int64_t{blockIdx.x} * kOut, steps = job.in / kInputs;
  // Outputs past the end read the last row again and are not stored.
  const uint8_t* codes[2 * kMt];
  const __nv_bfloat16* scales[2 * kMt];
#pragma unroll
  for (int m = 0; m < 2 * kMt; ++m) {
    const int64_t o = min(first + 8 * m + g, job.out - 1);
    codes[m] = job.codes + o * steps * kStepBytes + 16 * t;
    scales[m] = static_cast<const __nv_bfloat16*>(job.scales) + o * steps * 4 + t;  // 4 bits only
  }
  const int64_t first_row = int64_t{blockIdx.y} * kCols;
  const int rows = min(kCols, job.rows - static_cast<int>(first_row));
  const __nv_bfloat16* x = job.x + (first_row + g) * job.x_stride + (kFp8 ? 32 * (t >> 1) + 4 * (t & 1) : 32 * t);
  float acc[kMt][kTiles][4] = {};
  int64_t step = warp;
  for (; step + kWarps * (kUnroll - 1) < steps; step += kWarps * kUnroll) {
    Codes<kFp8, kMt> w[kUnroll];  // all reads first, so that many bytes are under way
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) w[u].read(codes, scales, step + u * kWarps);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      multiply_step<kFp8, kTiles, kMt>(w[u], x + (step + u * kWarps) * kInputs, job.x_stride, rows, g, acc);
    }
  }
  for (; step < steps; step += kWarps) {
    Codes<kFp8, kMt> w;
    w.read(codes, scales, step);
    multiply_step<kFp8, kTiles, kMt>(w, x + step * kInputs, job.x_stride, rows, g, acc);
  }
#pragma unroll
  for (int m = 0; m < kMt; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[warp][16 * m + g + 8 * (i >> 1)][8 * n + 2 * t + (i & 1)] = acc[m][n][i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kOut * kCols; i += 32 * kWarps) {
    const int o = i % kOut, r = i / kOut;
    if (r >= rows || first + o >= job.out) continue;
    float total = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) total += sums[part][o][r];
    if constexpr (kFp8) total *= static_cast<const float*>(job.scales)[first + o];
    put(job.y, first_row + r, first + o,
        job.beta == 0 ? total : total + job.beta * at(job.y, first_row + r, first + o));
  }
}

template <bool kFp8, int kTiles, int kMt, int kWarps, int kUnroll>
void launch(const Job& job, cudaStream_t on) {
  const auto blocks = static_cast<unsigned>((job.out + 16 * kMt - 1) / (16 * kMt));
  const auto pieces = static_cast<unsigned>((job.rows + 8 * kTiles - 1) / (8 * kTiles));
  skinny_quantised<kFp8, kTiles, kMt, kWarps, kUnroll><<<dim3(blocks, pieces), 32 * kWarps, 0, on>>>(job);
}

/// kMt, kUnroll for up to 8 rows; kMt16, kUnroll16 for more.
template <bool kFp8, int kWarps, int kMt, int kUnroll, int kMt16, int kUnroll16>
void launch_rows(const Job& job, cudaStream_t on) {
  if (job.rows <= 8) {
    launch<kFp8, 1, kMt, kWarps, kUnroll>(job, on);
  } else {
    launch<kFp8, 2, kMt16, kWarps, kUnroll16>(job, on);
  }
}

/// Outputs up to which many warps share an output tile; measured on an H200. The number of warps decides the order of
/// sums: it follows from the weight's shape, never from the rows.
constexpr int64_t kNarrow = 3072, kMedium = 5120, kWide = 8192, kVeryWide = 16384;

void launch_fp8(const Job& job, cudaStream_t on) {
  if (job.out <= kMedium) return launch_rows<true, 16, 1, 2, 1, 1>(job, on);
  if (job.out <= kWide) return launch_rows<true, 8, 1, 2, 1, 1>(job, on);
  if (job.out <= kVeryWide) return launch_rows<true, 8, 2, 2, 1, 2>(job, on);
  launch_rows<true, 4, 1, 8, 1, 2>(job, on);
}
void launch_int4(const Job& job, cudaStream_t on) {
  if (job.out <= kNarrow) return launch_rows<false, 16, 1, 2, 1, 1>(job, on);
  if (job.out <= kWide) return launch_rows<false, 8, 1, 4, 2, 1>(job, on);
  launch_rows<false, 4, 1, 4, 2, 2>(job, on);
}

}  // namespace

bool quantised_skinny(const Quantised& w, const Matrix& x, const Matrix& y, float beta, cudaStream_t on) {
  const bool aligned = reinterpret_cast<uintptr_t>(w.codes) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride % 8 == 0 &&
                       w.in % (w.fp8 ? kStepInputs<true> : kStepInputs<false>) == 0;
  if (!x.bf16 || !aligned) return false;
  const Job job{w.codes, w.scales, static_cast<const __nv_bfloat16*>(x.data),
                w.out,   w.in,     x.stride,
                y,       beta,     static_cast<int>(x.rows)};
  if (w.fp8) {
    launch_fp8(job, on);
  } else {
    launch_int4(job, on);
  }
  check(cudaGetLastError(), "linear");
  return true;
}

}  // namespace glm53::cuda
