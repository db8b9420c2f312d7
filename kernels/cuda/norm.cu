// Operators on one row at a time: embedding, norms, SwiGLU and hyper-connections (spec model §2, §3). A block has a
// row; its sums have a fixed order, so rows do not see each other.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"

namespace glm53::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kMaxStreams = 16;
constexpr int64_t kMaxHidden = 11264;  // f32 of a row in shared memory beside the small arrays

__global__ void embed_rows(const int32_t* token, Plain table, int64_t vocab, Plain given, int64_t rows, Matrix out) {
  const int64_t row = blockIdx.x;
  const int32_t id = row < rows ? token[row] : -1;
  for (int64_t i = threadIdx.x; i < out.columns; i += blockDim.x) {
    float v = 0;
    if (id >= 0 && id < vocab) {
      v = at(table, id * out.columns + i);
    } else if (row < rows && given.data != nullptr) {
      v = at(given, row * out.columns + i);
    }
    put(out, row, i, v);
  }
}

__global__ void normalise_rows(Matrix x, Plain weight, float eps, Matrix y) {
  __shared__ float room[32];
  const int64_t row = blockIdx.x;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < x.columns; i += blockDim.x) {
    const float v = at(x, row, i);
    squares = fmaf(v, v, squares);
  }
  const float r = 1.0F / sqrtf(block_sum(squares, room) / static_cast<float>(x.columns) + eps);
  for (int64_t i = threadIdx.x; i < x.columns; i += blockDim.x) {
    const float v = at(x, row, i) * r;
    put(y, row, i, weight.data == nullptr ? v : v * at(weight, i));
  }
}

constexpr int kNormThreads = 512, kNormPieces = 2;  // of eight values each

__device__ inline void eight(const uint4& raw, float (&v)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[2 * j] = __uint_as_float(words[j] << 16);
    v[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000U);
  }
}

/// The same for bf16 rows of up to 8,192 values, aligned to eight: a row is read once, the weights before the kernel
/// that writes the row is done.
__global__ void __launch_bounds__(kNormThreads) normalise_short(Matrix x, Plain weight, float eps, Matrix y) {
  __shared__ float room[32];
  const int64_t row = blockIdx.x;
  const auto at_piece = [](int i) { return (i * kNormThreads + static_cast<int>(threadIdx.x)) * 8; };
  float w[kNormPieces][8];
#pragma unroll
  for (int i = 0; i < kNormPieces; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) w[i][j] = 1;
    if (weight.data == nullptr || at_piece(i) >= x.columns) continue;
    if (weight.bf16) {
      eight(__ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(weight.data) + at_piece(i))), w[i]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) w[i][j] = __ldg(static_cast<const float*>(weight.data) + at_piece(i) + j);
    }
  }
  after_previous();
  float v[kNormPieces][8] = {}, squares = 0;
#pragma unroll
  for (int i = 0; i < kNormPieces; ++i) {
    if (at_piece(i) >= x.columns) continue;
    const auto* from = static_cast<const __nv_bfloat16*>(x.data) + row * x.stride + at_piece(i);
    eight(*reinterpret_cast<const uint4*>(from), v[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares = fmaf(v[i][j], v[i][j], squares);
  }
  const float r = 1.0F / sqrtf(block_sum(squares, room) / static_cast<float>(x.columns) + eps);
#pragma unroll
  for (int i = 0; i < kNormPieces; ++i) {
    if (at_piece(i) >= x.columns) continue;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat162 two =
          __floats2bfloat162_rn(v[i][2 * j] * r * w[i][2 * j], v[i][2 * j + 1] * r * w[i][2 * j + 1]);
      words[j] = reinterpret_cast<const uint32_t&>(two);
    }
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(y.data) + row * y.stride + at_piece(i)) = {
        words[0], words[1], words[2], words[3]};
  }
}

__global__ void gated_rows(Matrix o, Matrix gate, Plain weight, float eps, int64_t dim, Matrix y) {
  __shared__ float room[32];
  const int64_t row = blockIdx.x, column = blockIdx.y * dim;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
    const float v = at(o, row, column + i);
    squares = fmaf(v, v, squares);
  }
  const float r = 1.0F / sqrtf(block_sum(squares, room) / static_cast<float>(dim) + eps);
  for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
    put(y, row, column + i, at(o, row, column + i) * r * at(weight, i) * sigmoid(at(gate, row, column + i)));
  }
}

__global__ void swiglu_rows(Matrix gate, Matrix up, float limit, Matrix out) {
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (i < out.columns) put(out, row, i, swiglu_value(at(gate, row, i), at(up, row, i), limit));
}

__global__ void mean_rows(Matrix streams, int64_t n, Matrix out) {
  const int64_t row = blockIdx.x;
  for (int64_t d = threadIdx.x; d < out.columns; d += blockDim.x) {
    float v = at(streams, row, d);
    for (int64_t s = 1; s < n; ++s) v += at(streams, row, s * out.columns + d);
    put(out, row, d, v / static_cast<float>(n));
  }
}

/// Softmax of each row, then alternating column and row divisions; one thread, the matrix is tiny.
__device__ void sinkhorn(float* c, int n, float eps, int iterations) {
  for (int i = 0; i < n; ++i) {
    float* row = c + i * n;
    float top = row[0], total = 0;
    for (int j = 1; j < n; ++j) top = fmaxf(top, row[j]);
    for (int j = 0; j < n; ++j) total += row[j] = expf(row[j] - top);
    for (int j = 0; j < n; ++j) row[j] = row[j] / total + eps;
  }
  for (int step = 0; step < iterations; ++step) {
    for (int i = 0; step > 0 && i < n; ++i) {
      float total = 0;
      for (int j = 0; j < n; ++j) total += c[i * n + j];
      for (int j = 0; j < n; ++j) c[i * n + j] /= total + eps;
    }
    for (int j = 0; j < n; ++j) {
      float total = 0;
      for (int i = 0; i < n; ++i) total += c[i * n + j];
      for (int i = 0; i < n; ++i) c[i * n + j] /= total + eps;
    }
  }
}

struct Mix {
  Matrix streams, post, comb, u;
  const float* m;  ///< [rows][(2+n)n]: fn · X
  Plain base, scale, norm;
  float rms_eps, hc_eps;
  int n, sinkhorn;
};

/// The RMS factor of the row commutes with fn.
__global__ void mix_rows(Mix a) {
  __shared__ float room[32], pre[kMaxStreams], comb[kMaxStreams * kMaxStreams];
  extern __shared__ float mixed[];
  const int64_t row = blockIdx.x, hidden = a.u.columns;
  const int n = a.n;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < n * hidden; i += blockDim.x) {
    const float v = at(a.streams, row, i);
    squares = fmaf(v, v, squares);
  }
  const float rinv = 1.0F / sqrtf(block_sum(squares, room) / static_cast<float>(n * hidden) + a.rms_eps);
  const float* m = a.m + row * (2 + n) * n;
  if (threadIdx.x == 0) {
    for (int s = 0; s < n; ++s) {
      pre[s] = sigmoid(m[s] * rinv * at(a.scale, 0) + at(a.base, s)) + a.hc_eps;
      put(a.post, row, s, 2.0F * sigmoid(m[n + s] * rinv * at(a.scale, 1) + at(a.base, n + s)));
    }
    for (int i = 0; i < n * n; ++i) comb[i] = m[2 * n + i] * rinv * at(a.scale, 2) + at(a.base, 2 * n + i);
    sinkhorn(comb, n, a.hc_eps, a.sinkhorn);
    for (int i = 0; i < n * n; ++i) put(a.comb, row, i, comb[i]);
  }
  __syncthreads();
  squares = 0;
  for (int64_t d = threadIdx.x; d < hidden; d += blockDim.x) {
    float v = pre[0] * at(a.streams, row, d);
    for (int s = 1; s < n; ++s) v += pre[s] * at(a.streams, row, s * hidden + d);
    mixed[d] = v;
    squares = fmaf(v, v, squares);
  }
  const float r = 1.0F / sqrtf(block_sum(squares, room) / static_cast<float>(hidden) + a.rms_eps);
  for (int64_t d = threadIdx.x; d < hidden; d += blockDim.x) {
    put(a.u, row, d, a.norm.data == nullptr ? mixed[d] : mixed[d] * r * at(a.norm, d));
  }
}

__global__ void spread_rows(Matrix streams, Matrix y, Matrix post, Matrix comb, int n) {
  const int64_t row = blockIdx.x, d = int64_t{blockIdx.y} * blockDim.x + threadIdx.x, hidden = y.columns;
  if (d >= hidden) return;
  float x[kMaxStreams];
  const float out = at(y, row, d);
  for (int i = 0; i < n; ++i) x[i] = at(streams, row, i * hidden + d);
  for (int j = 0; j < n; ++j) {
    float v = at(post, row, j) * out;
    for (int i = 0; i < n; ++i) v += at(comb, row, i * n + j) * x[i];
    put(streams, row, j * hidden + d, v);
  }
}

unsigned rows_of(const Matrix& m) {
  return static_cast<unsigned>(m.rows);
}
unsigned parts(int64_t n) {
  return static_cast<unsigned>((n + kThreads - 1) / kThreads);
}

Matrix streams_of(std::string_view op, const Tensor& t) {
  const Matrix m = matrix(op, "streams", t, {-1, -1, -1});
  expect_that(t.dim(1) >= 1 && t.dim(1) <= kMaxStreams, op, "streams must be 1 … 16");
  return m;
}

}  // namespace

void CudaOps::embed(const EmbedArgs& args) {
  const Weight& table = *args.table;
  const Plain w = plain("embed", "table", table, table.out, table.in);
  const Matrix out = matrix("embed", "out", args.out, {-1, table.in});
  const Batch batch = staged(*args.batch);
  expect("embed", "token", batch.token, Dtype::i32, {out.rows});
  Plain given{nullptr, false};
  if (!batch.embedding.empty()) {
    const Matrix e = matrix("embed", "embedding", batch.embedding, {out.rows, table.in});
    expect_that(batch.embedding.contiguous(), "embed", "embedding must be contiguous");
    given = {e.data, e.bf16};
  }
  if (out.rows == 0) return;
  embed_rows<<<rows_of(out), kThreads, 0, stream()>>>(static_cast<const int32_t*>(batch.token.data), w, table.out,
                                                      given, args.batch->rows, out);
  check(cudaGetLastError(), "embed");
}

void CudaOps::rms_norm(const RmsNormArgs& args) {
  const Matrix x = matrix("rms_norm", "x", args.x, {-1, -1});
  const Matrix y = matrix("rms_norm", "y", args.y, {x.rows, x.columns});
  Plain w{nullptr, false};
  if (args.weight != nullptr && !args.weight->empty()) w = plain("rms_norm", "weight", *args.weight, x.columns, 1);
  if (x.rows == 0 || x.columns == 0) return;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (x.bf16 && y.bf16 && x.columns % 8 == 0 && x.columns <= kNormThreads * kNormPieces * 8 && x.stride % 8 == 0 &&
      y.stride % 8 == 0 && aligned(x.data) && aligned(y.data) && aligned(w.data)) {
    return launch_next(normalise_short, dim3(rows_of(x)), dim3(kNormThreads), stream(), x, w, args.eps, y);
  }
  normalise_rows<<<rows_of(x), kThreads, 0, stream()>>>(x, w, args.eps, y);
  check(cudaGetLastError(), "rms_norm");
}

void CudaOps::gated_norm(const GatedNormArgs& args) {
  const Matrix o = matrix("gated_norm", "o", args.o, {-1, -1});
  const Matrix gate = matrix("gated_norm", "gate", args.gate, {o.rows, o.columns});
  const Matrix y = matrix("gated_norm", "y", args.y, {o.rows, o.columns});
  expect_that(args.dim > 0 && o.columns % args.dim == 0, "gated_norm", "the width of o is not a multiple of dim");
  const Plain w = plain("gated_norm", "weight", *args.weight, args.dim, 1);
  if (o.rows == 0) return;
  gated_rows<<<dim3(rows_of(o), static_cast<unsigned>(o.columns / args.dim)), 64, 0, stream()>>>(o, gate, w, args.eps,
                                                                                                 args.dim, y);
  check(cudaGetLastError(), "gated_norm");
}

void CudaOps::swiglu(const SwigluArgs& args) {
  const Matrix gate = matrix("swiglu", "gate", args.gate, {-1, -1});
  const Matrix up = matrix("swiglu", "up", args.up, {gate.rows, gate.columns});
  const Matrix out = matrix("swiglu", "out", args.out, {gate.rows, gate.columns});
  if (gate.rows == 0 || gate.columns == 0) return;
  swiglu_rows<<<dim3(rows_of(gate), parts(gate.columns)), kThreads, 0, stream()>>>(gate, up, args.limit, out);
  check(cudaGetLastError(), "swiglu");
}

void CudaOps::stream_mean(const StreamMeanArgs& args) {
  const Matrix streams = streams_of("stream_mean", args.streams);
  const Matrix out = matrix("stream_mean", "out", args.out, {streams.rows, args.streams.dim(2)});
  if (streams.rows == 0) return;
  mean_rows<<<rows_of(out), kThreads, 0, stream()>>>(streams, args.streams.dim(1), out);
  check(cudaGetLastError(), "stream_mean");
}

void CudaOps::mhc_pre(const MhcPreArgs& args) {
  const std::string_view op = "mhc_pre";
  if (mhc_seam(nullptr, args)) return;
  const Matrix streams = streams_of(op, args.streams);
  const int64_t rows = streams.rows, n = args.streams.dim(1), hidden = args.streams.dim(2), values = (2 + n) * n;
  const Plain fn = plain(op, "fn", *args.site.fn, values, n * hidden);
  Mix mix{};
  mix.streams = streams;
  mix.post = matrix(op, "post", args.post, {rows, n});
  mix.comb = matrix(op, "comb", args.comb, {rows, n, n});
  mix.u = matrix(op, "u", args.u, {rows, hidden});
  mix.base = plain(op, "base", *args.site.base, values, 1);
  mix.scale = plain(op, "scale", *args.site.scale, 3, 1);
  if (args.norm != nullptr) mix.norm = plain(op, "norm", *args.norm, hidden, 1);
  mix.rms_eps = args.rms_eps;
  mix.hc_eps = args.hc_eps;
  mix.n = static_cast<int>(n);
  mix.sinkhorn = args.sinkhorn;
  expect_that(args.sinkhorn >= 1, op, "needs at least one Sinkhorn step");
  expect_that(hidden <= kMaxHidden, op, "hidden is larger than a row in shared memory");
  if (rows == 0 || hidden == 0) return;
  auto* m = scratch<float>(Area::mix, static_cast<size_t>(rows * values));
  mix.m = m;
  dense(fn, values, n * hidden, streams, {m, values, rows, values, false}, 0, true);
  mix_rows<<<rows_of(streams), kThreads, static_cast<size_t>(hidden) * sizeof(float), stream()>>>(mix);
  check(cudaGetLastError(), op);
}

void CudaOps::mhc_post(const MhcPostArgs& args) {
  const std::string_view op = "mhc_post";
  const Matrix streams = streams_of(op, args.streams);
  const int64_t rows = streams.rows, n = args.streams.dim(1), hidden = args.streams.dim(2);
  const Matrix y = matrix(op, "y", args.y, {rows, hidden}), post = matrix(op, "post", args.post, {rows, n});
  const Matrix comb = matrix(op, "comb", args.comb, {rows, n, n});
  if (rows == 0 || hidden == 0) return;
  spread_rows<<<dim3(rows_of(streams), parts(hidden)), kThreads, 0, stream()>>>(streams, y, post, comb,
                                                                                static_cast<int>(n));
  check(cudaGetLastError(), op);
}

void CudaOps::mhc_post_pre(const MhcPostPreArgs& args) {
  if (mhc_seam(&args.post, args.pre)) return;
  mhc_post(args.post);
  mhc_pre(args.pre);
}

}  // namespace glm53::cuda
