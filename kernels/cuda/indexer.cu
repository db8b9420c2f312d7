// Pooled indexer keys and the choice of pools (spec model §5.2, runtime §1.4–1.5, §2.6–2.7).
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/index_select.cuh"
#include "kernels/cuda/latent.cuh"

namespace glm53::cuda {
namespace {

constexpr int kMaxDim = 1024;   // a block's threads; index_dim is 128 in the real model
constexpr int kPoolSlice = 64;  // pools one block scores
constexpr unsigned kThreads = 256;
constexpr int64_t kScoreRoom = int64_t{1} << 24;  // scores held at once, at least one row

struct Ring {
  void *data, *snap;
  bool bf16;
  int64_t layers, layer, slots, dim, snaps;
};
struct KeyArgs {
  Matrix key, gate;
  Plain norm_weight, norm_bias, ape;
};

__device__ int64_t ring_at(const Ring& r, int64_t id, int64_t position) {
  return ((id * r.layers + r.layer) * r.slots + position % r.slots) * 2 * r.dim;
}

/// Stores 128 (8-bit) or index_dim shared values as the key of a pool. All threads of the block call it.
__device__ void write_pool_key(const LatentView& c, int64_t block, int64_t pool, float* v, float* scale) {
  uint8_t* codes = pool_row(c, block, pool);
  const unsigned t = threadIdx.x;
  if (!eight_bit(c)) {
    if (t < c.index_dim) store(codes, c.format == static_cast<int>(KvFormat::bf16), t, v[t]);
    return;
  }
  const bool active = t < kGroup;
  if (active) v[t] = __bfloat162float(__float2bfloat16_rn(v[t]));
  hadamard128(v, t, active);
  if (active) v[t] = __bfloat162float(__float2bfloat16_rn(v[t]));
  __syncthreads();
  if (t == 0) {
    bool nan = false;
    const float wanted = fmaxf(range_of(v, &nan), 1e-4F) / largest_code(c);
    int exponent = 0;
    const float mantissa = frexpf(wanted, &exponent);
    *scale = ldexpf(1.0F, mantissa > 0.5F ? exponent : exponent - 1);  // smallest power of two that is enough
    const bool lost = nan && c.format == static_cast<int>(KvFormat::int8_c528);
    *pool_scale(c, block, pool) = lost ? __int_as_float(0x7fffffff) : *scale;
  }
  __syncthreads();
  if (active) codes[t] = encode(c, v[t] / *scale);
}

/// One block a sequence, one thread a channel (whole warps). A pool is made of what the ring holds when its last token
/// arrives, so rows go one after the other; a thread reads only what it wrote itself.
__global__ void write_keys(Rows b, LatentView c, Ring ring, KeyArgs a) {
  __shared__ float room[32], v[kMaxDim], scale;
  const int64_t seq = blockIdx.x, slot = b.slot[seq], t = threadIdx.x, dim = ring.dim;
  if (slot < 0) return;
  const int64_t begin = b.row_begin[seq], end = b.row_begin[seq + 1];
  if (begin == end) return;
  const auto save = [&](int64_t tokens) {
    if (seq < b.window_seqs || b.export_pos == nullptr || ring.snap == nullptr || t >= dim) return;
    for (int e = 0; e < 2; ++e) {
      const int64_t snap = b.export_snap[2 * seq + e];
      if (b.export_pos[2 * seq + e] != tokens || snap < 0 || snap >= ring.snaps) continue;
      for (int64_t p = 0; p < 2 * ring.slots; ++p) {
        const int64_t from = ring_at(ring, slot, 0) + p * dim + t, to = ring_at(ring, snap, 0) + p * dim + t;
        store(ring.snap, ring.bf16, to, load(ring.data, ring.bf16, from));
      }
    }
  };
  save(b.position[begin]);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t position = b.position[row], here = ring_at(ring, slot, position);
    const float x = t < dim ? at(a.key, row, t) : 0.0F;
    const float mean = block_sum(x, room) / static_cast<float>(dim);
    const float centred = t < dim ? x - mean : 0.0F;
    const float r = 1.0F / sqrtf(block_sum(centred * centred, room) / static_cast<float>(dim) + 1e-6F);
    if (t < dim) {
      store(ring.data, ring.bf16, here + t, centred * r * at(a.norm_weight, t) + at(a.norm_bias, t));
      store(ring.data, ring.bf16, here + dim + t, at(a.gate, row, t));
    }
    if (position % c.kpool == c.kpool - 1) {
      if (t < dim) {
        const auto logit = [&](int64_t s) {
          return load(ring.data, ring.bf16, ring_at(ring, slot, position - c.kpool + 1 + s) + dim + t) +
                 at(a.ape, s * dim + t);
        };
        float largest = logit(0), total = 0, value = 0;
        for (int64_t s = 1; s < c.kpool; ++s) largest = fmaxf(largest, logit(s));
        for (int64_t s = 0; s < c.kpool; ++s) {
          const float w = expf(logit(s) - largest);
          total += w;
          value += w * load(ring.data, ring.bf16, ring_at(ring, slot, position - c.kpool + 1 + s) + t);
        }
        v[t] = value / total;
      }
      __syncthreads();
      const int64_t block = block_at(b, c, seq, position);
      if (block != 0) write_pool_key(c, block, position % kBlockTokens / c.kpool, v, &scale);
      __syncthreads();
    }
    save(position + 1);
  }
}

/// A block scores some pools of one row, a warp a pool.
__global__ void score_pools(Rows b, LatentView c, Select a) {
  extern __shared__ float query[];  // [heads][dim]
  const int64_t row = a.first_row + blockIdx.y, begin = int64_t{blockIdx.x} * kPoolSlice;
  const int64_t n = candidates(b, c, a, row), dim = c.index_dim;
  if (begin >= n || (n <= a.top && a.shown.data == nullptr)) return;
  for (int64_t i = threadIdx.x; i < a.heads * dim; i += blockDim.x) query[i] = at(a.query, row, i);
  __syncthreads();
  if (eight_bit(c)) {
    for (int64_t h = 0; h < a.heads; ++h) hadamard128(query + h * dim, threadIdx.x, threadIdx.x < kGroup);
  }
  const unsigned lane = threadIdx.x & 31U;
  const float scale = rsqrtf(static_cast<float>(dim)), head_scale = rsqrtf(static_cast<float>(a.heads));
  for (int64_t pool = begin + (threadIdx.x >> 5); pool < min(begin + kPoolSlice, n); pool += blockDim.x / 32) {
    const int64_t block = block_at(b, c, b.row_seq[row], pool * c.kpool), in_block = pool % (kBlockTokens / c.kpool);
    const uint8_t* codes = pool_row(c, block, in_block);
    const float code_scale = eight_bit(c) ? *pool_scale(c, block, in_block) : 1.0F;
    float total = 0;
    for (int64_t h = 0; h < a.heads; ++h) {
      float sum = 0;
      for (int64_t i = lane; i < dim; i += 32) sum = fmaf(value_at(c, codes, i, code_scale), query[h * dim + i], sum);
      sum = warp_sum(sum);
      total += at(a.head_weight, row, h) * head_scale * fmaxf(sum * scale, 0.0F);
    }
    if (lane == 0) a.scores[blockIdx.y * a.most + pool] = total;
  }
}

Ring ring_of(std::string_view op, const Caches& caches, int layer) {
  const CacheGeometry& g = caches.geometry;
  const auto fits = [&](const Tensor& t) {
    return (t.dtype == Dtype::f32 || t.dtype == Dtype::bf16) && t.contiguous() && t.place != Place::host &&
           t.elements() == t.dim(0) * g.mla_layers * g.ring() * 2 * g.index_dim;
  };
  expect_that(!caches.ring.empty() && fits(caches.ring), op, "caches.ring has another shape");
  expect_that(caches.snap_ring.empty() || (fits(caches.snap_ring) && caches.snap_ring.dtype == caches.ring.dtype), op,
              "caches.snap_ring has another shape");
  return {caches.ring.data,
          caches.snap_ring.data,
          caches.ring.dtype == Dtype::bf16,
          g.mla_layers,
          layer,
          g.ring(),
          g.index_dim,
          caches.snap_ring.empty() ? 0 : caches.snap_ring.dim(0)};
}

}  // namespace

void CudaOps::index_write(const IndexWriteArgs& args) {
  const std::string_view op = "index_write";
  const LatentView c = latent_view(op, *args.caches, args.layer);
  const int64_t dim = c.index_dim;
  expect_that(dim >= 1 && dim <= kMaxDim, op, "index_dim must be 1 … 1024");
  KeyArgs a{};
  a.key = matrix(op, "key", args.key, {-1, dim});
  a.gate = matrix(op, "gate", args.gate, {a.key.rows, dim});
  a.norm_weight = plain(op, "norm_weight", *args.norm_weight, dim, 1);
  a.norm_bias = plain(op, "norm_bias", *args.norm_bias, dim, 1);
  a.ape = plain(op, "ape", *args.ape, c.kpool, dim);
  const Ring ring = ring_of(op, *args.caches, args.layer);
  const Rows b = rows(op, *args.batch, a.key.rows);
  if (b.seqs == 0) return;
  const auto threads = static_cast<unsigned>((std::max<int64_t>(dim, kGroup) + 31) / 32 * 32);
  write_keys<<<static_cast<unsigned>(b.seqs), threads, 0, stream()>>>(b, c, ring, a);
  check(cudaGetLastError(), op);
}

void CudaOps::index_select(const IndexSelectArgs& args) {
  const std::string_view op = "index_select";
  const LatentView c = latent_view(op, *args.caches, args.layer);
  expect_that(args.heads > 0 && args.top_pools > 0, op, "heads and top_pools must be positive");
  Select a{};
  a.query = matrix(op, "query", args.query, {-1, int64_t{args.heads} * c.index_dim});
  const int64_t all = a.query.rows;
  a.head_weight = matrix(op, "head_weight", args.head_weight, {all, args.heads});
  expect(op, "selected", args.selected, Dtype::i32, {all, args.top_pools});
  expect(op, "n_selected", args.n_selected, Dtype::i32, {all});
  if (!args.scores.empty()) a.shown = matrix(op, "scores", args.scores, {all, -1});
  const Rows b = rows(op, *args.batch, all);
  if (all == 0) return;
  a.heads = args.heads;
  a.top = args.top_pools;
  a.most = std::max<int64_t>(int64_t{b.max_blocks} * kBlockTokens / c.kpool, 1);
  a.selected = static_cast<int32_t*>(args.selected.data);
  a.selected_stride = args.selected.stride[0];
  a.count = static_cast<int32_t*>(args.n_selected.data);
  const size_t shared = static_cast<size_t>(a.query.columns) * sizeof(float);
  check(cudaFuncSetAttribute(score_pools, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), op);
  const int64_t tile = std::clamp<int64_t>(kScoreRoom / a.most, 1, all);
  // Few rows over a long context are shared among blocks; the choice is exact, so this changes no bit.
  const bool shared_rows = all <= kSharedRows && a.most >= kSharedPools && a.most % 4 == 0 && a.top <= kMaxSharedTop;
  const auto words = static_cast<size_t>(tile * (a.most + (shared_rows ? choice_words(a) : 0)));
  a.scores = scratch<float>(Area::scores, words);
  const cudaStream_t on = stream();
  for (; a.first_row < all; a.first_row += tile) {
    const auto count = static_cast<unsigned>(std::min(tile, all - a.first_row));
    if (shared_rows) a.choices = clear_choices(a, count, tile, on);
    const bool fast = score_flash(b, c, a, count);
    if (!fast) {
      score_pools<<<dim3(static_cast<unsigned>((a.most + kPoolSlice - 1) / kPoolSlice), count), kThreads, shared, on>>>(
          b, c, a);
      check(cudaGetLastError(), op);
    }
    choose_pools(b, c, a, count, fast && shared_rows, on);
  }
}

}  // namespace glm53::cuda
