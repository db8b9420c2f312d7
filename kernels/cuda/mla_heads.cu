// absorb and expand on tensor cores, for bf16: a small product for each head with its part of kv_b (spec model §5.1).
// A block has 64 outputs of one head and up to 64 rows; 256 inputs of the weights lie in shared memory at a time. One
// chain of sums an output in ascending inputs: no bit of a row depends on how many rows there are.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace glm53::cuda {
namespace {

constexpr int kOuts = 64, kRows = 64, kInputs = 256, kThreads = 128, kPad = 8;
constexpr int kRoom = std::max(kOuts * (kInputs + kPad), kInputs*(kOuts + kPad));

struct HeadsJob {
  const __nv_bfloat16 *w, *x;
  int64_t w_step, in, out, x_stride, rows;
  Matrix y;
};

/// Inputs [first, first + kInputs) of the block's outputs. kColumns: the weights lie as [in][out], else as [out][in].
template <bool kColumns>
__device__ void load_weights(__nv_bfloat16* room, const __nv_bfloat16* w, int64_t first_out, int64_t first,
                             const HeadsJob& job) {
  constexpr int kLine = kColumns ? kOuts : kInputs, kLines = kColumns ? kInputs : kOuts;
  for (int item = static_cast<int>(threadIdx.x); item < kLines * kLine / 8; item += kThreads) {
    const int line = item / (kLine / 8), at = item % (kLine / 8) * 8;
    const int64_t o = first_out + (kColumns ? at : line), i = first + (kColumns ? line : at);
    const bool live = o < job.out && i < job.in;
    const int64_t from = live ? (kColumns ? i * job.out + o : o * job.in + i) : 0;
    copy_async16(shared_address(room + line * (kLine + kPad) + at), w + from, live);
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();
}

/// Block (64 outputs, head, 64 rows).
template <bool kColumns>
__global__ void __launch_bounds__(kThreads) multiply_heads(HeadsJob job) {
  __shared__ __align__(16) __nv_bfloat16 room[kRoom];
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int g = lane >> 2, t = lane & 3;
  const int64_t head = blockIdx.y, first_out = int64_t{blockIdx.x} * kOuts, first_row = int64_t{blockIdx.z} * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, job.rows - first_row));
  const __nv_bfloat16* w = job.w + head * job.w_step;
  const __nv_bfloat16* x = job.x + first_row * job.x_stride + head * job.in + 2 * t;
  const auto input = [&](int row, int64_t k) {
    return row < rows ? __ldg(reinterpret_cast<const uint32_t*>(x + row * job.x_stride + k)) : 0U;
  };
  float acc[kRows / 16][2][4] = {};
  for (int64_t first = 0; first < job.in; first += kInputs) {
    load_weights<kColumns>(room, w, first_out, first, job);
    const int steps = static_cast<int>(min(int64_t{kInputs}, job.in - first) / 16);
#pragma unroll 4
    for (int k = 0; k < steps; ++k) {
      uint32_t b[4];
      if constexpr (kColumns) {
        load_matrix4_transposed(
            b, shared_address(room + (16 * k + (lane & 15)) * (kOuts + kPad) + 16 * warp + (lane >> 4) * 8));
      } else {
        load_matrix4(b, shared_address(room + (16 * warp + (lane & 7) + ((lane & 16) >> 1)) * (kInputs + kPad) +
                                       16 * k + ((lane >> 3) & 1) * 8));
      }
#pragma unroll
      for (int m = 0; m < kRows / 16; ++m) {
        if (16 * m >= rows) break;
        const int64_t at = first + 16 * k;
        const uint32_t a0 = input(16 * m + g, at), a1 = input(16 * m + g + 8, at);
        const uint32_t a2 = input(16 * m + g, at + 8), a3 = input(16 * m + g + 8, at + 8);
        mma_bf16(acc[m][0], a0, a1, a2, a3, b[0], b[1]);
        mma_bf16(acc[m][1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = 16 * m + g + 8 * ((e >> 1) & 1);
      const int64_t o = first_out + 16 * warp + 8 * (e >> 2) + 2 * t + (e & 1);
      if (row < rows && o < job.out) put(job.y, first_row + row, head * job.out + o, acc[m][e >> 2][e & 3]);
    }
  }
}

}  // namespace

bool CudaOps::heads_gemm(const HeadsProduct& p, Matrix x, Matrix y) {
  const auto fits = [](const void* data, int64_t step) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && step % 8 == 0;
  };
  const int64_t line = p.columns ? p.out : p.in;
  if (!p.w.bf16 || !x.bf16 || p.in % 16 != 0 || line % 8 != 0) return false;
  if (!fits(p.w.data, p.w_step) || !fits(p.w.data, p.first) || !fits(x.data, x.stride)) return false;
  const HeadsJob job{static_cast<const __nv_bfloat16*>(p.w.data) + p.first,
                     static_cast<const __nv_bfloat16*>(x.data),
                     p.w_step,
                     p.in,
                     p.out,
                     x.stride,
                     x.rows,
                     y};
  const dim3 grid(static_cast<unsigned>((p.out + kOuts - 1) / kOuts), static_cast<unsigned>(p.heads),
                  static_cast<unsigned>((x.rows + kRows - 1) / kRows));
  if (p.columns) {
    multiply_heads<true><<<grid, kThreads, 0, stream()>>>(job);
  } else {
    multiply_heads<false><<<grid, kThreads, 0, stream()>>>(job);
  }
  check(cudaGetLastError(), "mla heads");
  return true;
}

}  // namespace glm53::cuda
