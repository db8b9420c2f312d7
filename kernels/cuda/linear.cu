// linear: y = W x for plain and quantised weights. One warp an output and up to eight rows; each row has its own sum
// over the lanes, so no bit depends on how many rows there are.
#include <algorithm>
#include <cstddef>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/quantised.cuh"

namespace glm53::cuda {
namespace {

constexpr int kRowTile = 8;  // rows that share one reading of the weights
constexpr int kOutTile = 8;  // warps, and so outputs, of a block

struct Dense {
  Plain w;
  int64_t out, in;
  Matrix x, y;
  float beta;
};

/// Eight neighbouring weights; one 16-byte load where they are bf16 and aligned.
__device__ void load8(const Plain& w, int64_t i, bool aligned, float (&v)[8]) {
  if (w.bf16 && aligned) {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(w.data) + i);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[2 * j] = __uint_as_float(words[j] << 16);
      v[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000U);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = at(w, i + j);
}

__global__ void dense_rows(Dense job, bool aligned) {
  const int64_t o = int64_t{blockIdx.x} * kOutTile + (threadIdx.x >> 5);
  const int64_t first = int64_t{blockIdx.y} * kRowTile;
  const unsigned lane = threadIdx.x & 31U;
  if (o >= job.out) return;
  const int rows = static_cast<int>(min(int64_t{kRowTile}, job.x.rows - first));
  float sum[kRowTile] = {};
  int64_t i = int64_t{lane} * 8;
  for (; i + 8 <= job.in; i += 256) {
    float w[8];
    load8(job.w, o * job.in + i, aligned, w);
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[r] = fmaf(w[j], at(job.x, first + r, i + j), sum[r]);
    }
  }
  for (; i < job.in; ++i) {  // the last piece, shorter than eight: one lane at most has it
    const float w = at(job.w, o * job.in + i);
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) {
      if (r < rows) sum[r] = fmaf(w, at(job.x, first + r, i), sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    if (r >= rows) break;
    const float total = warp_sum(sum[r]);
    if (lane == 0) {
      put(job.y, first + r, o, job.beta == 0 ? total : total + job.beta * at(job.y, first + r, o));
    }
  }
}

/// Value i of output o, whatever the format.
__device__ float value_of(const Quantised& w, int64_t o, int64_t i) {
  if (w.fp8) {
    uint32_t pair[2];
    widen_fp8(w.codes[o * w.in + device_place(true, i)], pair);
    return __uint_as_float(pair[0] << 16) * static_cast<const float*>(w.scales)[o];
  }
  const int64_t place = o * w.in + device_place(false, i);
  const int code = (w.codes[place / 2] >> (place % 2 * 4) & 15) - 8;
  return static_cast<float>(code) *
         __bfloat162float(static_cast<const __nv_bfloat16*>(w.scales)[o * (w.in / kQuantGroup) + i / kQuantGroup]);
}

/// The plain form for quantised weights: a warp an output and up to eight rows.
__global__ void quantised_rows(Quantised w, Matrix x, Matrix y, float beta) {
  const int64_t o = int64_t{blockIdx.x} * kOutTile + (threadIdx.x >> 5), first = int64_t{blockIdx.y} * kRowTile;
  if (o >= w.out) return;
  const int rows = static_cast<int>(min(int64_t{kRowTile}, x.rows - first));
  float sum[kRowTile] = {};
  for (int64_t i = threadIdx.x & 31U; i < w.in; i += 32) {
    const float value = value_of(w, o, i);
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) {
      if (r < rows) sum[r] = fmaf(value, at(x, first + r, i), sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    if (r >= rows) break;
    const float total = warp_sum(sum[r]);
    if ((threadIdx.x & 31U) == 0) put(y, first + r, o, beta == 0 ? total : total + beta * at(y, first + r, o));
  }
}

Quantised quantised_view(const Weight& w) {
  const Weight want = quantised_weight(w.format, w.out, w.in, nullptr, nullptr, Place::device);
  const bool fp8 = w.format == WeightFormat::fp8_row;
  expect("linear", "codes of w", w.codes, want.codes.dtype, {w.out, want.codes.dim(1)});
  if (fp8) {
    expect("linear", "scales of w", w.scales, Dtype::f32, {w.out});
  } else {
    expect("linear", "scales of w", w.scales, Dtype::bf16, {w.out, w.in / kQuantGroup});
  }
  expect_that(w.codes.contiguous() && w.scales.contiguous(), "linear", "codes or scales of w are not contiguous");
  return {static_cast<const uint8_t*>(w.codes.data), w.scales.data, w.out, w.in, fp8};
}

void quantised(const Quantised& w, const Matrix& x, const Matrix& y, float beta, bool window, cudaStream_t on) {
  if (x.rows == 0) return;
  if (window ? quantised_skinny(w, x, y, beta, on) : quantised_gemm(w, x, y, beta, on)) return;
  const dim3 grid(static_cast<unsigned>((w.out + kOutTile - 1) / kOutTile),
                  static_cast<unsigned>((x.rows + kRowTile - 1) / kRowTile));
  quantised_rows<<<grid, 32 * kOutTile, 0, on>>>(w, x, y, beta);
  check(cudaGetLastError(), "linear");
}

Matrix rows_of_matrix(const Matrix& m, int64_t begin, int64_t end) {
  Matrix part = m;
  part.data = static_cast<std::byte*>(m.data) + begin * m.stride * (m.bf16 ? 2 : 4);
  part.rows = end - begin;
  return part;
}

}  // namespace

void CudaOps::dense(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta, bool window) {
  if (x.rows == 0 || out == 0) return;
  if (window ? dense_skinny(w, out, in, x, y, beta) : dense_gemm(w, out, in, x, y, beta)) return;
  const bool aligned = in % 8 == 0 && reinterpret_cast<uintptr_t>(w.data) % 16 == 0;
  const dim3 grid(static_cast<unsigned>((out + kOutTile - 1) / kOutTile),
                  static_cast<unsigned>((x.rows + kRowTile - 1) / kRowTile));
  dense_rows<<<grid, 32 * kOutTile, 0, stream()>>>({w, out, in, x, y, beta}, aligned);
  check(cudaGetLastError(), "linear");
}

void CudaOps::linear(const LinearArgs& args) {
  const Weight& w = *args.w;
  const Matrix x = matrix("linear", "x", args.x, {-1, w.in});
  const Matrix y = matrix("linear", "y", args.y, {args.x.dim(0), w.out});
  if (args.x.dim(0) == 0 || w.out == 0) return;
  if (w.format == WeightFormat::exl3) {
    return linear_exl3(linear_view("linear", "w", w, w.out, w.in), w.out, w.in, x, y, args.beta);
  }
  const int64_t window = std::min<int64_t>(args.window_rows, x.rows);
  if (is_quantised(w.format)) {
    const Quantised view = quantised_view(w);
    const cudaStream_t on = stream();
    quantised(view, rows_of_matrix(x, 0, window), rows_of_matrix(y, 0, window), args.beta, true, on);
    return quantised(view, rows_of_matrix(x, window, x.rows), rows_of_matrix(y, window, x.rows), args.beta, false, on);
  }
  const Plain view = plain("linear", "w", w, w.out, w.in);
  dense(view, w.out, w.in, rows_of_matrix(x, 0, window), rows_of_matrix(y, 0, window), args.beta, true);
  dense(view, w.out, w.in, rows_of_matrix(x, window, x.rows), rows_of_matrix(y, window, x.rows), args.beta, false);
}

}  // namespace glm53::cuda
