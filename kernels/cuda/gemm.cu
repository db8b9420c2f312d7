// linear for many rows (the chunk family): y = x Wᵀ with bf16 weights and activations through mma.sync, tiles of both
// in shared memory behind cp.async. Every output is one chain of m16n8k16 steps in ascending inputs, whatever the tile
// shape: a row has the same bits however a prompt is cut.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace glm53::cuda {
namespace {

struct Gemm {
  const __nv_bfloat16 *x, *w;
  int64_t rows, out, in, x_stride;
  Matrix y;
  float beta;
};

/// Shape of a block: kM rows × kN outputs, warps in kWarpsM × kWarpsN, stages of kStep inputs.
template <int kRows, int kOuts, int kRowWarps, int kOutWarps, int kInputs, int kDepth>
struct Shape {
  static constexpr int kM = kRows, kN = kOuts, kWarpsM = kRowWarps, kWarpsN = kOutWarps, kStep = kInputs;
  static constexpr int kStages = kDepth, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpM = kM / kWarpsM, kWarpN = kN / kWarpsN;
  static constexpr int kBytes = kStages * (kM + kN) * kStep * 2;
};

/// Where 16 bytes of a stage lie: rows of 64 or 128 bytes, turned so that eight rows of a column use all banks.
template <int kStep>
__device__ int stage_place(int row, int chunk) {
  static_assert(kStep == 32 || kStep == 64);
  return row * kStep + ((chunk ^ (kStep == 32 ? (row >> 1) & 3 : row & 7)) << 3);
}

/// Rows [first, first + kRows) and inputs [at, at + kStep) of a row-major matrix; zeros past its end.
template <int kRows, class S>
__device__ void load_tile(__nv_bfloat16* tile, const __nv_bfloat16* from, int64_t stride, int64_t first, int64_t limit,
                          int64_t at, int64_t in) {
  constexpr int kChunks = S::kStep / 8;
#pragma unroll
  for (int i = 0; i < kRows * kChunks / S::kThreads; ++i) {
    const int item = i * S::kThreads + static_cast<int>(threadIdx.x), row = item / kChunks, chunk = item % kChunks;
    const bool live = first + row < limit && at + 8 * chunk < in;
    copy_async16(shared_address(tile + stage_place<S::kStep>(row, chunk)),
                 from + (live ? (first + row) * stride + at + 8 * chunk : 0), live);
  }
}

template <class S>
__device__ void multiply_stage(const __nv_bfloat16* x, const __nv_bfloat16* w,
                               float (&acc)[S::kWarpM / 16][S::kWarpN / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int row = warp / S::kWarpsN * S::kWarpM, column = warp % S::kWarpsN * S::kWarpN;
#pragma unroll
  for (int k = 0; k < S::kStep / 16; ++k) {
    uint32_t a[S::kWarpM / 16][4], b[S::kWarpN / 16][4];
#pragma unroll
    for (int m = 0; m < S::kWarpM / 16; ++m) {
      load_matrix4(a[m], shared_address(x + stage_place<S::kStep>(row + 16 * m + (lane & 15), 2 * k + (lane >> 4))));
    }
#pragma unroll
    for (int n = 0; n < S::kWarpN / 16; ++n) {  // 16 outputs: matrices (outputs 0–7 | 8–15) × (inputs 0–7 | 8–15)
      load_matrix4(b[n], shared_address(w + stage_place<S::kStep>(column + 16 * n + (lane & 7) + ((lane & 16) >> 1),
                                                                  2 * k + ((lane >> 3) & 1))));
    }
#pragma unroll
    for (int m = 0; m < S::kWarpM / 16; ++m) {
#pragma unroll
      for (int n = 0; n < S::kWarpN / 16; ++n) {
        mma_bf16(acc[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[n][0], b[n][1]);
        mma_bf16(acc[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[n][2], b[n][3]);
      }
    }
  }
}

/// Two neighbouring outputs of a row.
__device__ void store_pair(const Gemm& job, int64_t r, int64_t o, float v0, float v1) {
  if (r >= job.rows || o >= job.out) return;
  const bool both = o + 1 < job.out;
  if (job.beta != 0) {
    v0 += job.beta * at(job.y, r, o);
    if (both) v1 += job.beta * at(job.y, r, o + 1);
  }
  if (both && job.y.bf16 && (job.y.stride & 1) == 0 && (reinterpret_cast<uintptr_t>(job.y.data) & 3U) == 0) {
    auto* to = static_cast<__nv_bfloat16*>(job.y.data) + r * job.y.stride + o;
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(v0, v1);
    return;
  }
  put(job.y, r, o, v0);
  if (both) put(job.y, r, o + 1, v1);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads) gemm(Gemm job) {
  extern __shared__ __align__(128) __nv_bfloat16 room[];
  __nv_bfloat16* const xs = room;
  __nv_bfloat16* const ws = room + S::kStages * S::kM * S::kStep;
  const int64_t first_row = int64_t{blockIdx.x} * S::kM, first_out = int64_t{blockIdx.y} * S::kN;
  const auto load = [&](int stage, int64_t step) {
    load_tile<S::kM, S>(xs + stage * S::kM * S::kStep, job.x, job.x_stride, first_row, job.rows, step * S::kStep,
                        job.in);
    load_tile<S::kN, S>(ws + stage * S::kN * S::kStep, job.w, job.in, first_out, job.out, step * S::kStep, job.in);
  };
  const int64_t steps = (job.in + S::kStep - 1) / S::kStep;
#pragma unroll
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < steps) load(s, s);
    copy_commit();
  }
  float acc[S::kWarpM / 16][S::kWarpN / 8][4] = {};
  int stage = 0;
  for (int64_t step = 0; step < steps; ++step) {
    copy_wait<S::kStages - 2>();
    __syncthreads();
    const int64_t next = step + S::kStages - 1;
    if (next < steps) load(stage == 0 ? S::kStages - 1 : stage - 1, next);
    copy_commit();
    multiply_stage<S>(xs + stage * S::kM * S::kStep, ws + stage * S::kN * S::kStep, acc);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int64_t row0 = first_row + warp / S::kWarpsN * S::kWarpM + (lane >> 2);
  const int64_t out0 = first_out + warp % S::kWarpsN * S::kWarpN + 2 * (lane & 3);
#pragma unroll
  for (int m = 0; m < S::kWarpM / 16; ++m) {
#pragma unroll
    for (int n = 0; n < S::kWarpN / 8; ++n) {
      store_pair(job, row0 + 16 * m, out0 + 8 * n, acc[m][n][0], acc[m][n][1]);
      store_pair(job, row0 + 16 * m + 8, out0 + 8 * n, acc[m][n][2], acc[m][n][3]);
    }
  }
}

template <class S>
void launch(const Gemm& job, cudaStream_t on) {
  check(cudaFuncSetAttribute(gemm<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes), "linear");
  const dim3 grid(static_cast<unsigned>((job.rows + S::kM - 1) / S::kM),
                  static_cast<unsigned>((job.out + S::kN - 1) / S::kN));
  gemm<S><<<grid, S::kThreads, S::kBytes, on>>>(job);
}

using Large = Shape<128, 128, 2, 2, 64, 3>;
using Small = Shape<64, 64, 2, 2, 64, 4>;
constexpr int kInputUnit = 8;  // inputs that are loaded together
static_assert(Large::kBytes <= 99 << 10 && Small::kBytes <= 99 << 10, "GB10 has 99 KiB of shared memory a block");

}  // namespace

bool CudaOps::dense_gemm(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta) {
  const bool aligned = reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                       x.stride % 8 == 0 && in % kInputUnit == 0;
  if (!w.bf16 || !x.bf16 || !aligned) return false;
  const Gemm job{static_cast<const __nv_bfloat16*>(x.data),
                 static_cast<const __nv_bfloat16*>(w.data),
                 x.rows,
                 out,
                 in,
                 x.stride,
                 y,
                 beta};
  constexpr int64_t kFew = 160;  // blocks below which smaller tiles fill the card better
  const int64_t blocks = (x.rows + 127) / 128 * ((out + 127) / 128);
  if (blocks < kFew) {
    launch<Small>(job, stream());
  } else {
    launch<Large>(job, stream());
  }
  check(cudaGetLastError(), "linear");
  return true;
}

}  // namespace glm53::cuda
