// linear for many rows (the chunk family): y = x Wᵀ with bf16 activations through mma.sync, tiles of both in shared
// memory behind cp.async. Every output is one chain of m16n8k16 steps in ascending inputs, whatever the tile shape: a
// row has the same bits however a prompt is cut. Quantised weights stay codes in shared memory and are widened to bf16
// on the way to the tensor cores, which gives the bits of the same weights in bf16.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/quantised.cuh"

namespace glm53::cuda {
namespace {

enum class Kind : uint8_t { bf16, fp8, int4 };

struct Gemm {
  const __nv_bfloat16* x;
  const void *w, *scales;
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
};

/// Bytes of a stage's part of the weights: bf16 values, or codes and then, at 4 bits, the scales.
template <class S, Kind kKind>
constexpr int kCodeBytes = S::kN * S::kStep *
                           (kKind == Kind::bf16  ? 4
                            : kKind == Kind::fp8 ? 2
                                                 : 1) /
                           2;
template <class S, Kind kKind>
constexpr int kWeightBytes = kCodeBytes<S, kKind> + (kKind == Kind::int4 ? S::kN * (S::kStep / 32) * 2 : 0);
template <class S, Kind kKind>
constexpr int kBytes = S::kStages * (S::kM * S::kStep * 2 + kWeightBytes<S, kKind>);

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

/// Where 16 bytes of codes lie: rows of 64 (fp8) or 32 bytes, turned so that a warp's reads use all banks.
template <Kind kKind>
__device__ int code_address(int row, int chunk) {
  return kKind == Kind::fp8 ? row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4)
                            : row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4);
}

/// Codes of kN outputs and kStep inputs from `at` on, and their scales; zeros past the end.
template <class S, Kind kKind>
__device__ void load_codes(uint8_t* stage, const Gemm& job, int64_t first, int64_t at) {
  static_assert(S::kStep == 64);
  constexpr int kChunks = kKind == Kind::fp8 ? 4 : 2, kInputs = S::kStep / kChunks;  // 16 bytes of codes
  constexpr int kPerByte = kKind == Kind::fp8 ? 1 : 2;
#pragma unroll
  for (int i = 0; i < S::kN * kChunks / S::kThreads; ++i) {
    const int item = i * S::kThreads + static_cast<int>(threadIdx.x), row = item / kChunks, chunk = item % kChunks;
    const int64_t input = at + kInputs * chunk;
    const bool live = first + row < job.out && input < job.in;
    copy_async16(shared_address(stage + code_address<kKind>(row, chunk)),
                 static_cast<const uint8_t*>(job.w) + (live ? ((first + row) * job.in + input) / kPerByte : 0), live);
  }
  if constexpr (kKind == Kind::int4) {  // two groups an output
    static_assert(S::kN <= S::kThreads);
    const int row = static_cast<int>(threadIdx.x);
    const bool live = row < S::kN && first + row < job.out;
    if (row < S::kN) {
      copy_async4(shared_address(stage + kCodeBytes<S, kKind> + 4 * row),
                  static_cast<const __nv_bfloat16*>(job.scales) +
                      (live ? (first + row) * (job.in / kQuantGroup) + at / kQuantGroup : 0),
                  live);
    }
  }
}

/// The pairs of inputs 8j + 2t of a group of 32, for output `row` of the stage.
template <class S, Kind kKind>
__device__ void widen_codes(const uint8_t* stage, int row, int group, int t, uint32_t (&pair)[4]) {
  if constexpr (kKind == Kind::fp8) {
    const uint2 words =
        *reinterpret_cast<const uint2*>(stage + code_address<kKind>(row, 2 * group + (t >> 1)) + 8 * (t & 1));
    uint32_t two[2];
    widen_fp8(words.x, two);
    pair[0] = two[0];
    pair[1] = two[1];
    widen_fp8(words.y, two);
    pair[2] = two[0];
    pair[3] = two[1];
  } else {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(stage + code_address<kKind>(row, group) + 4 * t);
    const __nv_bfloat16 scale = reinterpret_cast<const __nv_bfloat16*>(stage + kCodeBytes<S, kKind>)[2 * row + group];
    widen_int4(word, __bfloat162bfloat162(scale), pair);
  }
}

template <class S, Kind kKind>
__device__ void multiply_codes(const __nv_bfloat16* x, const uint8_t* w,
                               float (&acc)[S::kWarpM / 16][S::kWarpN / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int row = warp / S::kWarpsN * S::kWarpM, column = warp % S::kWarpsN * S::kWarpN;
#pragma unroll
  for (int group = 0; group < S::kStep / 32; ++group) {
    uint32_t a[2][S::kWarpM / 16][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int m = 0; m < S::kWarpM / 16; ++m) {
        load_matrix4(a[k][m], shared_address(x + stage_place<S::kStep>(row + 16 * m + (lane & 15),
                                                                       4 * group + 2 * k + (lane >> 4))));
      }
    }
#pragma unroll
    for (int n = 0; n < S::kWarpN / 8; ++n) {
      uint32_t b[4];
      widen_codes<S, kKind>(w, column + 8 * n + (lane >> 2), group, lane & 3, b);
#pragma unroll
      for (int m = 0; m < S::kWarpM / 16; ++m) {
        mma_bf16(acc[m][n], a[0][m][0], a[0][m][1], a[0][m][2], a[0][m][3], b[0], b[1]);
        mma_bf16(acc[m][n], a[1][m][0], a[1][m][1], a[1][m][2], a[1][m][3], b[2], b[3]);
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

template <class S, Kind kKind>
__global__ void __launch_bounds__(S::kThreads) gemm(Gemm job) {
  extern __shared__ __align__(128) uint8_t room[];
  auto* const xs = reinterpret_cast<__nv_bfloat16*>(room);
  uint8_t* const ws = room + S::kStages * S::kM * S::kStep * 2;
  const int64_t first_row = int64_t{blockIdx.x} * S::kM, first_out = int64_t{blockIdx.y} * S::kN;
  const auto load = [&](int stage, int64_t step) {
    load_tile<S::kM, S>(xs + stage * S::kM * S::kStep, job.x, job.x_stride, first_row, job.rows, step * S::kStep,
                        job.in);
    uint8_t* w = ws + stage * kWeightBytes<S, kKind>;
    if constexpr (kKind == Kind::bf16) {
      load_tile<S::kN, S>(reinterpret_cast<__nv_bfloat16*>(w), static_cast<const __nv_bfloat16*>(job.w), job.in,
                          first_out, job.out, step * S::kStep, job.in);
    } else {
      load_codes<S, kKind>(w, job, first_out, step * S::kStep);
    }
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
    const __nv_bfloat16* x = xs + stage * S::kM * S::kStep;
    const uint8_t* w = ws + stage * kWeightBytes<S, kKind>;
    if constexpr (kKind == Kind::bf16) {
      multiply_stage<S>(x, reinterpret_cast<const __nv_bfloat16*>(w), acc);
    } else {
      multiply_codes<S, kKind>(x, w, acc);
    }
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int64_t row0 = first_row + warp / S::kWarpsN * S::kWarpM + (lane >> 2);
  const int64_t out0 = first_out + warp % S::kWarpsN * S::kWarpN + 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < S::kWarpN / 8; ++n) {
    float s0 = 1, s1 = 1;  // of the two outputs
    if constexpr (kKind == Kind::fp8) {
      const auto* scales = static_cast<const float*>(job.scales);
      const int64_t o = out0 + 8 * n;
      s0 = o < job.out ? scales[o] : 0.0F;
      s1 = o + 1 < job.out ? scales[o + 1] : 0.0F;
    }
#pragma unroll
    for (int m = 0; m < S::kWarpM / 16; ++m) {
      store_pair(job, row0 + 16 * m, out0 + 8 * n, acc[m][n][0] * s0, acc[m][n][1] * s1);
      store_pair(job, row0 + 16 * m + 8, out0 + 8 * n, acc[m][n][2] * s0, acc[m][n][3] * s1);
    }
  }
}

template <class S, Kind kKind>
void launch(const Gemm& job, cudaStream_t on) {
  constexpr int kShared = kBytes<S, kKind>;
  static_assert(kShared <= 99 << 10, "GB10 has 99 KiB of shared memory a block");
  check(cudaFuncSetAttribute(gemm<S, kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "linear");
  const dim3 grid(static_cast<unsigned>((job.rows + S::kM - 1) / S::kM),
                  static_cast<unsigned>((job.out + S::kN - 1) / S::kN));
  gemm<S, kKind><<<grid, S::kThreads, kShared, on>>>(job);
}

using Large = Shape<128, 128, 2, 2, 64, 3>;
using Small = Shape<64, 64, 2, 2, 64, 4>;
constexpr int kInputUnit = 8;  // inputs that are loaded together

template <Kind kKind>
void launch_shape(const Gemm& job, cudaStream_t on) {
  constexpr int64_t kFew = 160;  // blocks below which smaller tiles fill the card better
  const int64_t blocks = (job.rows + 127) / 128 * ((job.out + 127) / 128);
  if (blocks < kFew) {
    launch<Small, kKind>(job, on);
  } else {
    launch<Large, kKind>(job, on);
  }
  check(cudaGetLastError(), "linear");
}

bool aligned(const void* w, const Matrix& x) {
  return reinterpret_cast<uintptr_t>(w) % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride % 8 == 0;
}

}  // namespace

bool CudaOps::dense_gemm(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta) {
  if (!w.bf16 || !x.bf16 || !aligned(w.data, x) || in % kInputUnit != 0) return false;
  launch_shape<Kind::bf16>(
      {static_cast<const __nv_bfloat16*>(x.data), w.data, nullptr, x.rows, out, in, x.stride, y, beta}, stream());
  return true;
}

bool quantised_gemm(const Quantised& w, const Matrix& x, const Matrix& y, float beta, cudaStream_t on) {
  if (!x.bf16 || !aligned(w.codes, x) || (!w.fp8 && w.in % 64 != 0)) return false;
  const Gemm job{static_cast<const __nv_bfloat16*>(x.data), w.codes, w.scales, x.rows, w.out, w.in, x.stride, y, beta};
  if (w.fp8) {
    launch_shape<Kind::fp8>(job, on);
  } else {
    launch_shape<Kind::int4>(job, on);
  }
  return true;
}

}  // namespace glm53::cuda
