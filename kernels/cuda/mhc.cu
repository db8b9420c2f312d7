// The hyper-connection seam for four streams (model §3): one kernel spreads a site's output over the streams and, with
// the values still in registers, takes the next site's products; a second turns them into coefficients and the next
// input. Products are cut into slices of 128 columns and added in their order.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"

namespace glm53::cuda {
namespace {

constexpr int kStreams = 4, kValues = (2 + kStreams) * kStreams;
constexpr int kSlice = 128;            // columns, and threads, of a block of `spread`
constexpr int kRowTile = 4;            // rows that share one reading of fn
constexpr int kPartial = kValues + 1;  // products, then the sum of squares
constexpr int64_t kFewRows = 64;       // the same bits on either side
constexpr int kMixThreads = 512, kMaxHidden = 8192, kPerThread = kMaxHidden / kMixThreads;

struct Seam {
  Matrix streams;
  Matrix y, post, comb;  ///< of the site before; y.data null: nothing to spread
  Plain fn;
  float* partial;  ///< [rows][slices][kPartial]
  int64_t rows, hidden;
  int slices;
};

/// Block (slice, four rows). T: type of fn. kFew: where rows are few, waiting is what counts, and fn is read while the
/// kernel before still runs; where they are many, registers are.
template <class T, bool kFew>
__global__ void __launch_bounds__(kSlice) spread(Seam a) {
  __shared__ float sums[kSlice / 32][kRowTile * kPartial];
  const int64_t d = int64_t{blockIdx.x} * kSlice + threadIdx.x;
  const T* fn = static_cast<const T*>(a.fn.data) + d;
  T weights[kFew ? kValues * kStreams : 1];
  if constexpr (kFew) {
#pragma unroll
    for (int o = 0; o < kValues * kStreams; ++o) weights[o] = __ldg(fn + o * a.hidden);
  }
  after_previous();
  const int64_t first = int64_t{blockIdx.y} * kRowTile;
  const int rows = static_cast<int>(min(int64_t{kRowTile}, a.rows - first));
  float x[kRowTile][kStreams] = {};
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    if (r >= rows) break;
    const int64_t row = first + r;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) x[r][s] = at(a.streams, row, s * a.hidden + d);
    if (a.y.data == nullptr) continue;
    const float out = at(a.y, row, d);
    float now[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      now[j] = at(a.post, row, j) * out;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) now[j] += at(a.comb, row, i * kStreams + j) * x[r][i];
    }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      put(a.streams, row, j * a.hidden + d, now[j]);
      // What is stored is what later steps read.
      x[r][j] = a.streams.bf16 ? __bfloat162float(__float2bfloat16_rn(now[j])) : now[j];
    }
  }
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const auto leave = [&](int o, const float(&v)[kRowTile]) {
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) {
      if (r >= rows) break;
      const float total = warp_sum(v[r]);
      if (lane == 0) sums[warp][r * kPartial + o] = total;
    }
  };
#pragma unroll(kFew ? kValues : 4)
  for (int o = 0; o < kValues; ++o) {
    float v[kRowTile] = {};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const int i = o * kStreams + s;
      const auto w = static_cast<float>(kFew ? weights[kFew ? i : 0] : __ldg(fn + i * a.hidden));
#pragma unroll
      for (int r = 0; r < kRowTile; ++r) v[r] = fmaf(w, x[r][s], v[r]);
    }
    leave(o, v);
  }
  float squares[kRowTile] = {};
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) squares[r] = fmaf(x[r][s], x[r][s], squares[r]);
  }
  leave(kValues, squares);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows * kPartial; i += kSlice) {
    float total = sums[0][i];
#pragma unroll
    for (int w = 1; w < kSlice / 32; ++w) total += sums[w][i];
    a.partial[((first + i / kPartial) * a.slices + blockIdx.x) * kPartial + i % kPartial] = total;
  }
}

struct Coefficients {
  Matrix streams, post, comb, u;
  const float* partial;
  Plain base, scale, norm;
  float rms_eps, hc_eps;
  int slices, sinkhorn;
};

/// Sums over the four lanes of a row (neighbours) or of a column (four apart) of the 4×4 matrix in lanes 0 … 15.
__device__ float row_sum(float v) {
  v += __shfl_xor_sync(0xffffffffU, v, 1);
  return v + __shfl_xor_sync(0xffffffffU, v, 2);
}
__device__ float column_sum(float v) {
  v += __shfl_xor_sync(0xffffffffU, v, 4);
  return v + __shfl_xor_sync(0xffffffffU, v, 8);
}

/// Softmax of the rows, then columns and rows in turn (model §3); every lane of the warp calls it.
__device__ float sinkhorn(float v, float eps, int iterations) {
  float top = fmaxf(v, __shfl_xor_sync(0xffffffffU, v, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, 2));
  const float e = expf(v - top);
  float c = e / row_sum(e) + eps;
  for (int step = 0; step < iterations; ++step) {
    if (step > 0) c /= row_sum(c) + eps;
    c /= column_sum(c) + eps;
  }
  return c;
}

/// Block (row).
template <bool kFew>
__global__ void __launch_bounds__(kMixThreads) mix(Coefficients a) {
  __shared__ float room[32], pre[kStreams];
  after_previous();
  const int64_t row = blockIdx.x, hidden = a.u.columns;
  // The first streams' values come while the first warp works out the coefficients.
  constexpr int kEarly = kFew ? 8 : 0;
  float x[kFew ? kEarly : 1][kStreams];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int64_t d = min(int64_t{i} * kMixThreads + threadIdx.x, hidden - 1);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) x[i][s] = at(a.streams, row, s * hidden + d);
  }
  if (threadIdx.x < 32) {
    const auto lane = static_cast<int>(threadIdx.x);
    float m = 0;
#pragma unroll 8
    for (int s = 0; s < a.slices; ++s) m += lane < kPartial ? a.partial[(row * a.slices + s) * kPartial + lane] : 0.0F;
    const float squares = __shfl_sync(0xffffffffU, m, kValues);
    m *= 1.0F / sqrtf(squares / static_cast<float>(kStreams * hidden) + a.rms_eps);
    const int kind = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
    if (lane < kValues) m = m * at(a.scale, kind) + at(a.base, lane);
    if (kind == 0) pre[lane] = sigmoid(m) + a.hc_eps;
    if (kind == 1) put(a.post, row, lane - kStreams, 2.0F * sigmoid(m));
    const float c = sinkhorn(__shfl_sync(0xffffffffU, m, 2 * kStreams + (lane & 15)), a.hc_eps, a.sinkhorn);
    if (lane < kStreams * kStreams) put(a.comb, row, lane, c);
  }
  __syncthreads();
  float mixed[kPerThread], squares = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t d = int64_t{i} * kMixThreads + threadIdx.x;
    if (d >= hidden) break;
    const auto value = [&](int s) { return i < kEarly ? x[kFew ? i % 8 : 0][s] : at(a.streams, row, s * hidden + d); };
    float v = pre[0] * value(0);
#pragma unroll
    for (int s = 1; s < kStreams; ++s) v += pre[s] * value(s);
    mixed[i] = v;
    squares = fmaf(v, v, squares);
  }
  const float r = 1.0F / sqrtf(block_sum(squares, room) / static_cast<float>(hidden) + a.rms_eps);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t d = int64_t{i} * kMixThreads + threadIdx.x;
    if (d >= hidden) break;
    put(a.u, row, d, a.norm.data == nullptr ? mixed[i] : mixed[i] * r * at(a.norm, d));
  }
}

}  // namespace

bool CudaOps::mhc_seam(const MhcPostArgs* before, const MhcPreArgs& args) {
  const std::string_view op = before == nullptr ? "mhc_pre" : "mhc_post_pre";
  const int64_t hidden = args.streams.dim(2);
  if (args.streams.dim(1) != kStreams || hidden % kSlice != 0 || hidden > kMaxHidden) return false;
  Seam seam{};
  seam.streams = matrix(op, "streams", args.streams, {-1, kStreams, hidden});
  seam.rows = seam.streams.rows;
  seam.hidden = hidden;
  seam.slices = static_cast<int>(hidden / kSlice);
  if (before != nullptr) {
    expect_that(before->streams.data == args.streams.data, op, "the two sites have different streams");
    seam.y = matrix(op, "y", before->y, {seam.rows, hidden});
    seam.post = matrix(op, "post", before->post, {seam.rows, kStreams});
    seam.comb = matrix(op, "comb", before->comb, {seam.rows, kStreams, kStreams});
  }
  seam.fn = plain(op, "fn", *args.site.fn, kValues, kStreams * hidden);
  Coefficients next{};
  next.streams = seam.streams;
  next.post = matrix(op, "post", args.post, {seam.rows, kStreams});
  next.comb = matrix(op, "comb", args.comb, {seam.rows, kStreams, kStreams});
  next.u = matrix(op, "u", args.u, {seam.rows, hidden});
  next.base = plain(op, "base", *args.site.base, kValues, 1);
  next.scale = plain(op, "scale", *args.site.scale, 3, 1);
  if (args.norm != nullptr) next.norm = plain(op, "norm", *args.norm, hidden, 1);
  next.rms_eps = args.rms_eps;
  next.hc_eps = args.hc_eps;
  next.slices = seam.slices;
  next.sinkhorn = args.sinkhorn;
  expect_that(args.sinkhorn >= 1, op, "needs at least one Sinkhorn step");
  if (seam.rows == 0) return true;
  seam.partial = scratch<float>(Area::mix, static_cast<size_t>(seam.rows * seam.slices * kPartial));
  next.partial = seam.partial;
  const cudaStream_t on = stream();
  const auto rows = static_cast<unsigned>(seam.rows);
  const dim3 grid(static_cast<unsigned>(seam.slices), (rows + kRowTile - 1) / kRowTile);
  const bool few = seam.rows <= kFewRows;
  const auto spreading = seam.fn.bf16 ? (few ? spread<__nv_bfloat16, true> : spread<__nv_bfloat16, false>)
                                      : (few ? spread<float, true> : spread<float, false>);
  launch_next(spreading, grid, kSlice, on, seam);
  launch_next(few ? mix<true> : mix<false>, rows, kMixThreads, on, next);
  return true;
}

}  // namespace glm53::cuda
