// Absorbed latent attention over selected pools (spec model §5.1, runtime §2.1–2.3).
#include <cfloat>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/latent.cuh"

namespace glm53::cuda {
namespace {

constexpr int kTile = 32;  // tokens of one softmax step: splits follow from the context alone
constexpr unsigned kThreads = 128;

__global__ void write_latents(Rows b, LatentView c, Matrix latent) {
  __shared__ float v[kGroup], scale;
  const int64_t row = blockIdx.x;
  if (padding_row(b, row)) return;
  const int64_t position = b.position[row], token = position % kBlockTokens;
  const int64_t block = block_at(b, c, b.row_seq[row], position);
  if (block == 0) return;
  uint8_t* codes = latent_row(c, block, token);
  if (!eight_bit(c)) {
    for (int64_t i = threadIdx.x; i < c.latent; i += blockDim.x) {
      store(codes, c.format == static_cast<int>(KvFormat::bf16), i, at(latent, row, i));
    }
    return;
  }
  for (int64_t g = 0; g < c.latent / kGroup; ++g) {
    v[threadIdx.x] = at(latent, row, g * kGroup + threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) {
      bool nan = false;
      scale = fmaxf(range_of(v, &nan) / largest_code(c), FLT_MIN);
      // int8 has no NaN of its own; losing one silently would hide a fault upstream.
      const bool lost = nan && c.format == static_cast<int>(KvFormat::int8_c528);
      latent_scales(c, block, token)[g] = lost ? __int_as_float(0x7fffffff) : scale;
    }
    __syncthreads();
    codes[g * kGroup + threadIdx.x] = encode(c, v[threadIdx.x] / scale);
    __syncthreads();
  }
}

struct Heads {
  Plain kv_b;
  int64_t heads, nope, v, latent;
};

/// One block a row and head, one thread a latent column.
__global__ void absorb(Heads h, Matrix q, Matrix out) {
  extern __shared__ float query[];
  const int64_t row = blockIdx.x, head = blockIdx.y;
  for (int64_t n = threadIdx.x; n < h.nope; n += blockDim.x) query[n] = at(q, row, head * h.nope + n);
  __syncthreads();
  const int64_t first = head * (h.nope + h.v) * h.latent;
  for (int64_t l = threadIdx.x; l < h.latent; l += blockDim.x) {
    float sum = 0;
    for (int64_t n = 0; n < h.nope; ++n) sum = fmaf(at(h.kv_b, first + n * h.latent + l), query[n], sum);
    put(out, row, head * h.latent + l, sum);
  }
}

/// One block a row and head, one warp an output.
__global__ void expand(Heads h, Matrix a, Matrix out) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const unsigned lane = threadIdx.x & 31U;
  for (int64_t i = threadIdx.x >> 5; i < h.v; i += blockDim.x / 32) {
    const int64_t first = (head * (h.nope + h.v) + h.nope + i) * h.latent;
    float sum = 0;
    for (int64_t l = lane; l < h.latent; l += 32)
      sum = fmaf(at(h.kv_b, first + l), at(a, row, head * h.latent + l), sum);
    sum = warp_sum(sum);
    if (lane == 0) put(out, row, head * h.v + i, sum);
  }
}

struct Attention {
  Matrix q, out;
  const int32_t *selected, *count;
  int64_t selected_stride;
  float scale;
};

/// One block a row and head: scores of a tile by warps, then every thread its latent columns, with a running maximum.
__global__ void attend(Rows b, LatentView c, Attention a) {
  extern __shared__ float room[];  // q, then the sums: [latent] each
  __shared__ float weight[kTile];
  __shared__ int64_t block_of[kTile], token_of[kTile];
  float *query = room, *sums = room + c.latent;
  const int64_t row = blockIdx.x, head = blockIdx.y, column = head * c.latent;
  if (padding_row(b, row)) {
    for (int64_t l = threadIdx.x; l < c.latent; l += blockDim.x) put(a.out, row, column + l, 0.0F);
    return;
  }
  for (int64_t l = threadIdx.x; l < c.latent; l += blockDim.x) {
    query[l] = at(a.q, row, column + l);
    sums[l] = 0;
  }
  const int64_t visible = int64_t{b.position[row]} + 1, pools = a.count[row], seq = b.row_seq[row];
  const int64_t tail = visible - visible % c.kpool, count = pools * c.kpool + visible % c.kpool;
  const int32_t* selected = a.selected + row * a.selected_stride;
  const unsigned lane = threadIdx.x & 31U, warp = threadIdx.x >> 5, warps = blockDim.x / 32;
  float largest = -INFINITY, total = 0;
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int n = static_cast<int>(min(int64_t{kTile}, count - begin));
    __syncthreads();
    if (threadIdx.x < n) {
      const int64_t i = begin + threadIdx.x, pool = i / c.kpool;
      const int64_t position =
          pool < pools ? int64_t{selected[pool]} * c.kpool + i % c.kpool : tail + i - pools * c.kpool;
      block_of[threadIdx.x] = block_at(b, c, seq, position);
      token_of[threadIdx.x] = position % kBlockTokens;
    }
    __syncthreads();
    for (unsigned j = warp; j < static_cast<unsigned>(n); j += warps) {
      float sum = 0;
      for (int64_t l = lane; l < c.latent; l += 32)
        sum = fmaf(query[l], latent_value(c, block_of[j], token_of[j], l), sum);
      sum = warp_sum(sum);
      if (lane == 0) weight[j] = sum * a.scale;
    }
    __syncthreads();
    float top = largest;
    for (int j = 0; j < n; ++j) top = fmaxf(top, weight[j]);
    const float shrink = expf(largest - top);  // 0 in the first tile
    largest = top;
    total *= shrink;
    for (int j = 0; j < n; ++j) total += expf(weight[j] - top);
    for (int64_t l = threadIdx.x; l < c.latent; l += blockDim.x) {
      float sum = sums[l] * shrink;
      for (int j = 0; j < n; ++j) sum = fmaf(expf(weight[j] - top), latent_value(c, block_of[j], token_of[j], l), sum);
      sums[l] = sum;
    }
  }
  for (int64_t l = threadIdx.x; l < c.latent; l += blockDim.x) put(a.out, row, column + l, sums[l] / total);
}

Heads heads_of(std::string_view op, const Weight& w, int heads, int nope, int v) {
  expect_that(heads > 0 && nope > 0 && v > 0 && w.in > 0, op, "heads, nope, v and latent must be positive");
  return {plain(op, "kv_b", w, int64_t{heads} * (nope + v), w.in), heads, nope, v, w.in};
}

}  // namespace

void CudaOps::latent_write(const LatentWriteArgs& args) {
  const std::string_view op = "latent_write";
  const LatentView c = latent_view(op, *args.caches, args.layer);
  const Matrix latent = matrix(op, "latent", args.latent, {-1, c.latent});
  const Rows b = rows(op, *args.batch, latent.rows);
  if (b.rows == 0) return;
  write_latents<<<static_cast<unsigned>(b.rows), kGroup, 0, stream()>>>(b, c, latent);
  check(cudaGetLastError(), op);
}

void CudaOps::mla_absorb(const MlaAbsorbArgs& args) {
  const std::string_view op = "mla_absorb";
  const Heads h = heads_of(op, *args.kv_b, args.heads, args.nope, args.v);
  const Matrix q = matrix(op, "q", args.q, {-1, h.heads * h.nope});
  const Matrix out = matrix(op, "out", args.out, {q.rows, h.heads * h.latent});
  const int64_t step = (h.nope + h.v) * h.latent;
  if (q.rows == 0 || heads_gemm({h.kv_b, 0, step, h.heads, h.nope, h.latent, true}, q, out)) return;
  absorb<<<dim3(static_cast<unsigned>(q.rows), static_cast<unsigned>(h.heads)), kThreads,
           static_cast<size_t>(h.nope) * sizeof(float), stream()>>>(h, q, out);
  check(cudaGetLastError(), op);
}

void CudaOps::mla_sparse(const MlaSparseArgs& args) {
  const std::string_view op = "mla_sparse";
  const LatentView c = latent_view(op, *args.caches, args.layer);
  Attention a{};
  a.q = matrix(op, "q_latent", args.q_latent, {-1, int64_t{args.heads} * c.latent});
  a.out = matrix(op, "out", args.out, {a.q.rows, a.q.columns});
  expect(op, "selected", args.selected, Dtype::i32, {a.q.rows, -1});
  expect(op, "n_selected", args.n_selected, Dtype::i32, {a.q.rows});
  a.selected = static_cast<const int32_t*>(args.selected.data);
  a.selected_stride = args.selected.stride[0];
  a.count = static_cast<const int32_t*>(args.n_selected.data);
  a.scale = args.scale;
  const Rows b = rows(op, *args.batch, a.q.rows);
  if (a.q.rows == 0 || mla_flash(args, b, c, a.q, a.out)) return;
  attend<<<dim3(static_cast<unsigned>(a.q.rows), static_cast<unsigned>(args.heads)), kThreads,
           2 * static_cast<size_t>(c.latent) * sizeof(float), stream()>>>(b, c, a);
  check(cudaGetLastError(), op);
}

void CudaOps::mla_expand(const MlaExpandArgs& args) {
  const std::string_view op = "mla_expand";
  const Heads h = heads_of(op, *args.kv_b, args.heads, args.nope, args.v);
  const Matrix a = matrix(op, "a", args.a, {-1, h.heads * h.latent});
  const Matrix out = matrix(op, "out", args.out, {a.rows, h.heads * h.v});
  const int64_t step = (h.nope + h.v) * h.latent;
  if (a.rows == 0 || heads_gemm({h.kv_b, h.nope * h.latent, step, h.heads, h.latent, h.v, false}, a, out)) return;
  expand<<<dim3(static_cast<unsigned>(a.rows), static_cast<unsigned>(h.heads)), kThreads, 0, stream()>>>(h, a, out);
  check(cudaGetLastError(), op);
}

}  // namespace glm53::cuda
