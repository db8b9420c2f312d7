// linear for few rows (the window family): y = W x with bf16 weights and activations. The weights are the A operand,
// read once and straight into fragments; up to 32 rows of x are the columns of B. Everything is bound by the bytes of
// W.
//
// A block owns 16·kMt outputs; its warps take the steps of 32 inputs in turn and their sums are added in warp order, so
// no bit of a row depends on how many rows there are. The order of inputs inside a step is permuted alike for W and x:
// a thread's 16 bytes are 8 neighbouring inputs, which serve two m16n8k16 steps (inputs 8t+4s, +1 | +2, +3).
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace glm53::cuda {
namespace {

constexpr int kStep = 32;  // inputs a warp takes at once

struct Skinny {
  const __nv_bfloat16 *w, *x;
  int64_t out, in, x_stride;
  Matrix y;
  float beta;
  int rows;
};

/// acc += kUnroll steps of inputs from `at` on, `apart` inputs between them: all loads first, so that many bytes are
/// under way.
template <int kTiles, int kMt, int kUnroll>
__device__ void take_steps(const __nv_bfloat16* const (&w)[2 * kMt], const __nv_bfloat16* x, const Skinny& job,
                           int64_t at, int64_t apart, int g, float (&acc)[kMt][kTiles][4]) {
  uint4 a[kUnroll][2 * kMt], b[kUnroll][kTiles];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int m = 0; m < 2 * kMt; ++m) a[u][m] = load_once(reinterpret_cast<const uint4*>(w[m] + at + u * apart));
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bool live = 8 * n + g < job.rows;
      b[u][n] = live ? __ldg(reinterpret_cast<const uint4*>(x + 8 * n * job.x_stride + at + u * apart)) : uint4{};
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int m = 0; m < kMt; ++m) {
      const uint4 low = a[u][2 * m], high = a[u][2 * m + 1];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma_bf16(acc[m][n], low.x, high.x, low.y, high.y, b[u][n].x, b[u][n].y);
        mma_bf16(acc[m][n], low.z, high.z, low.w, high.w, b[u][n].z, b[u][n].w);
      }
    }
  }
}

template <int kTiles, int kMt, int kWarps, int kUnroll>
__global__ void __launch_bounds__(32 * kWarps) skinny(Skinny job) {
  constexpr int kOut = 16 * kMt, kCols = 8 * kTiles;
  __shared__ float sums[kWarps][kOut][kCols + 1];
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2, t = lane & 3;
  const int64_t first = int64_t{blockIdx.x} * kOut, steps = job.in / kStep;
  // Outputs past the end read the last row again and are not stored.
  const __nv_bfloat16* w[2 * kMt];
#pragma unroll
  for (int m = 0; m < 2 * kMt; ++m) w[m] = job.w + min(first + 8 * m + g, job.out - 1) * job.in + 8 * t;
  const int64_t first_row = int64_t{blockIdx.y} * kCols;
  job.rows = min(kCols, job.rows - static_cast<int>(first_row));
  const __nv_bfloat16* x = job.x + (first_row + g) * job.x_stride + 8 * t;
  float acc[kMt][kTiles][4] = {};
  int64_t step = warp;
  for (; step + kWarps * (kUnroll - 1) < steps; step += kWarps * kUnroll) {
    take_steps<kTiles, kMt, kUnroll>(w, x, job, step * kStep, kWarps * kStep, g, acc);
  }
  for (; step < steps; step += kWarps) take_steps<kTiles, kMt, 1>(w, x, job, step * kStep, 0, g, acc);
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
    if (r >= job.rows || first + o >= job.out) continue;
    float total = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) total += sums[part][o][r];
    put(job.y, first_row + r, first + o,
        job.beta == 0 ? total : total + job.beta * at(job.y, first_row + r, first + o));
  }
}

template <int kTiles, int kMt, int kWarps, int kUnroll>
void launch(const Skinny& job, cudaStream_t on) {
  const auto blocks = static_cast<unsigned>((job.out + 16 * kMt - 1) / (16 * kMt));
  const auto pieces = static_cast<unsigned>((job.rows + 8 * kTiles - 1) / (8 * kTiles));
  skinny<kTiles, kMt, kWarps, kUnroll><<<dim3(blocks, pieces), 32 * kWarps, 0, on>>>(job);
}

/// Outputs up to which 32, 16 and 8 warps share an output tile; above kWide a block has two tiles, above kVeryWide only
/// for up to 8 rows. Measured on an H200; each keeps the number of blocks near a multiple of what the card holds.
constexpr int64_t kNarrow = 1024, kMedium = 5120, kWide = 8192, kVeryWide = 16384;

template <int kMt, int kMt16, int kWarps, int kUnroll8, int kUnroll16>
void launch_rows(const Skinny& job, cudaStream_t on) {
  if (job.rows <= 8) {
    launch<1, kMt, kWarps, kUnroll8>(job, on);
  } else if (kWarps >= 16 || job.rows <= 16) {  // many warps lack the registers and shared memory for more at once
    launch<2, kMt16, kWarps, kUnroll16>(job, on);
  } else if constexpr (kWarps < 16) {
    launch<4, 1, kWarps, 2>(job, on);
  }
}

}  // namespace

bool CudaOps::dense_skinny(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta) {
  const bool aligned = reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                       x.stride % 8 == 0 && in % kStep == 0;
  if (!w.bf16 || !x.bf16 || !aligned) return false;
  const Skinny job{static_cast<const __nv_bfloat16*>(w.data),
                   static_cast<const __nv_bfloat16*>(x.data),
                   out,
                   in,
                   x.stride,
                   y,
                   beta,
                   static_cast<int>(x.rows)};
  // The number of warps decides the order of sums: it follows from the weight's shape, never from the rows.
  if (out <= kNarrow) {
    launch_rows<1, 1, 32, 2, 1>(job, stream());
  } else if (out <= kMedium) {
    launch_rows<1, 1, 16, 2, 2>(job, stream());
  } else if (out <= kWide) {
    launch_rows<1, 1, 8, 2, 2>(job, stream());
  } else if (out <= kVeryWide) {
    launch_rows<2, 2, 8, 2, 4>(job, stream());
  } else {
    launch_rows<2, 1, 8, 2, 2>(job, stream());
  }
  check(cudaGetLastError(), "linear");
  return true;
}

}  // namespace glm53::cuda
