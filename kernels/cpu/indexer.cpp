// Pooled indexer keys and the choice of pools (spec model §5.2, runtime §1.4–1.5, §2.6–2.7).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "common/error.h"
#include "kernels/cpu/batch_rows.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/latent_cache.h"
#include "kernels/cpu/row_gemm.h"

namespace glm53::cpu {
namespace {

constexpr float kLayerNormEps = 1e-6F;
constexpr int64_t kPoolSlice = 256;               // pools one task scores
constexpr int64_t kScoreRoom = int64_t{1} << 20;  // scores held at once, at least one row

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

float inverse_root(int64_t n) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
}

// The ring of raw keys and gates: f32 [ids][mla_layers][ring][2][index_dim], whatever way the dimensions are grouped.
class Ring {
 public:
  Ring(const Caches& caches, int layer, std::string_view op)
      : caches_(caches), op_(op), layer_(layer), slots_(caches.geometry.ring()), dim_(caches.geometry.index_dim) {
    check(caches.ring, "caches.ring");
    if (!caches.snap_ring.empty()) check(caches.snap_ring, "caches.snap_ring");
  }
  float* key(int64_t slot, int64_t position) const { return at(caches_.ring, slot) + position % slots_ * 2 * dim_; }
  float* gate(int64_t slot, int64_t position) const { return key(slot, position) + dim_; }
  void save(int64_t slot, int64_t snap) const {
    if (caches_.snap_ring.empty() || snap < 0 || snap >= caches_.snap_ring.dim(0)) {
      throw Error(Code::internal, std::string(op_) + ": snapshot " + std::to_string(snap) + " is outside the pool");
    }
    const auto bytes = static_cast<size_t>(slots_ * 2 * dim_) * sizeof(float);
    std::memcpy(at(caches_.snap_ring, snap), at(caches_.ring, slot), bytes);
  }

 private:
  void check(const Tensor& t, std::string_view name) const {
    const int64_t item = caches_.geometry.mla_layers * slots_ * 2 * dim_;
    const bool fits = !t.empty() && t.dtype == Dtype::f32 && t.contiguous() && t.rank >= 1 && t.dim(0) > 0 &&
                      t.elements() == t.dim(0) * item;
    expect_that(fits, op_, std::string(name) + " is not f32 [ids][mla_layers][ring][2][index_dim]");
  }
  float* at(const Tensor& t, int64_t id) const {
    return t.as<float>() + (id * caches_.geometry.mla_layers + layer_) * slots_ * 2 * dim_;
  }

  const Caches& caches_;
  std::string_view op_;
  int64_t layer_, slots_, dim_;
};

void layer_norm(const float* x, const Weight& weight, const Weight& bias, int64_t n, float* y) {
  const float mean = sum(x, n) / static_cast<float>(n);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] - mean;
  const float r = 1.0F / std::sqrt(dot(y, y, n) / static_cast<float>(n) + kLayerNormEps);
  for (int64_t i = 0; i < n; ++i) y[i] = y[i] * r * value_at(weight, i) + value_at(bias, i);
}

// The key of the pool that ends with `last`: per channel, the tokens' keys weighted by a softmax of gate + ape.
void pool_key(const Ring& ring, const Weight& ape, int64_t slot, int64_t last, int64_t kpool, int64_t dim, float* y) {
  for (int64_t c = 0; c < dim; ++c) {
    const auto logit = [&](int64_t s) { return ring.gate(slot, last - kpool + 1 + s)[c] + value_at(ape, s * dim + c); };
    float largest = logit(0);
    for (int64_t s = 1; s < kpool; ++s) largest = std::max(largest, logit(s));
    float total = 0, value = 0;
    for (int64_t s = 0; s < kpool; ++s) {
      const float w = std::exp(logit(s) - largest);
      total += w;
      value += w * ring.key(slot, last - kpool + 1 + s)[c];
    }
    y[c] = value / total;
  }
}

// A score as an integer of the same order, −0 equal to +0, with the pool below it so that a tie goes to the lower pool.
uint64_t sort_key(float score, int64_t pool) {
  const auto bits = std::bit_cast<uint32_t>(score == 0.0F ? 0.0F : score);
  const uint32_t ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return (uint64_t{ordered} << 32) | static_cast<uint32_t>(~static_cast<uint32_t>(pool));
}

// Scores complete pools of one row.
class Scorer {
 public:
  static int64_t scratch(int64_t heads, int64_t dim) { return dim + (dim + 2) * lanes(heads); }

  Scorer(const IndexSelectArgs& args, const LatentCache& cache, float* at)
      : args_(args), cache_(cache), heads_(args.heads), dim_(cache.index_dim()) {
    query_ = at;  // [dim][lanes(heads)], zero beyond the heads
    key_ = query_ + lanes(heads_) * dim_;
    weight_ = key_ + dim_;
    product_ = weight_ + lanes(heads_);
    std::fill_n(query_, lanes(heads_) * dim_, 0.0F);
  }

  void set_row(int64_t row) {
    const float* q = args_.query.as<float>() + row * args_.query.stride[0];
    const float* w = args_.head_weight.as<float>() + row * args_.head_weight.stride[0];
    for (int64_t h = 0; h < heads_; ++h) {
      std::memcpy(key_, q + h * dim_, static_cast<size_t>(dim_) * sizeof(float));
      if (cache_.rotated()) hadamard128(key_, static_cast<int>(dim_));
      for (int64_t i = 0; i < dim_; ++i) query_[i * lanes(heads_) + h] = key_[i];
      weight_[h] = w[h] * inverse_root(heads_);
    }
  }

  float score(BlockId block, int pool) {
    cache_.read_pool_key(block, pool, key_);
    row_gemm({key_, dim_}, {query_, lanes(heads_)}, {product_, lanes(heads_)}, 1, dim_, lanes(heads_), false);
    float total = 0;
    for (int64_t h = 0; h < heads_; ++h) total += weight_[h] * std::max(product_[h] * scale_, 0.0F);
    return total;
  }

 private:
  // Heads rounded up to whole vectors.
  static int64_t lanes(int64_t heads) { return ceil_div(heads, 16) * 16; }

  const IndexSelectArgs& args_;
  const LatentCache& cache_;
  int64_t heads_, dim_;
  float scale_ = inverse_root(dim_);
  float *query_, *key_, *weight_, *product_;
};

// The selection of one step.
class Selection {
 public:
  Selection(const IndexSelectArgs& args, const BatchRows& batch)
      : args_(args), batch_(batch), kpool_(args.caches->geometry.kpool) {}

  int64_t candidates(int64_t row) const {
    return batch_.padding(row) ? 0 : (int64_t{batch_.position(row)} + 1) / kpool_;
  }
  bool scored(int64_t row) const { return candidates(row) > args_.top_pools || !args_.scores.empty(); }

  void score(int64_t row, int64_t begin, int64_t end, float* scores, Scorer& scorer) const {
    scorer.set_row(row);
    const int64_t pools_in_block = kBlockTokens / kpool_;
    for (int64_t pool = begin; pool < end; ++pool) {
      const BlockId block = block_at(*args_.batch, *args_.caches, batch_.seq_of(row), pool * kpool_, "index_select");
      scores[pool] = scorer.score(block, static_cast<int>(pool % pools_in_block));
    }
  }

  // `keys` has room for one entry a candidate.
  void choose(int64_t row, const float* scores, uint64_t* keys) const {
    const int64_t n = candidates(row), wanted = std::min<int64_t>(n, args_.top_pools);
    int32_t* selected = args_.selected.as<int32_t>() + row * args_.selected.stride[0];
    args_.n_selected.as<int32_t>()[row] = static_cast<int32_t>(wanted);
    std::fill_n(selected, args_.selected.dim(1), -1);
    if (n <= args_.top_pools) {
      for (int64_t pool = 0; pool < n; ++pool) selected[pool] = static_cast<int32_t>(pool);
      return;
    }
    for (int64_t pool = 0; pool < n; ++pool) keys[pool] = sort_key(scores[pool], pool);
    std::nth_element(keys, keys + wanted, keys + n, std::greater<>());
    for (int64_t i = 0; i < wanted; ++i) selected[i] = static_cast<int32_t>(~static_cast<uint32_t>(keys[i]));
    std::sort(selected, selected + wanted);
  }

 private:
  const IndexSelectArgs& args_;
  const BatchRows& batch_;
  int64_t kpool_;
};

// What the caller asked to see: scores of candidates, −∞ for pools that are none, zeros in padding rows.
void show_scores(const Tensor& to, int64_t row, const float* scores, int64_t n, bool padding) {
  if (to.empty()) return;
  float* out = to.as<float>() + row * to.stride[0];
  std::fill_n(out, to.dim(1), padding ? 0.0F : -std::numeric_limits<float>::infinity());
  std::copy_n(scores, std::min(n, to.dim(1)), out);
}

void check_select(std::string_view op, const IndexSelectArgs& args, int64_t dim) {
  const int64_t rows = args.query.dim(0);
  expect_that(args.heads > 0 && args.top_pools > 0, op, "heads and top_pools must be positive");
  expect(op, "query", args.query, Dtype::f32, {rows, args.heads * dim});
  expect(op, "head_weight", args.head_weight, Dtype::f32, {rows, args.heads});
  expect(op, "selected", args.selected, Dtype::i32, {rows, args.top_pools});
  expect(op, "n_selected", args.n_selected, Dtype::i32, {rows});
  if (!args.scores.empty()) expect(op, "scores", args.scores, Dtype::f32, {rows, -1});
}

}  // namespace

void CpuOps::index_write(const IndexWriteArgs& args) {
  const std::string_view op = "index_write";
  const int64_t rows = args.key.dim(0);
  const LatentCache cache(*args.caches, args.layer, op);
  const BatchRows batch(*args.batch, *args.caches, rows, op);
  const Ring ring(*args.caches, args.layer, op);
  const int64_t kpool = args.caches->geometry.kpool, dim = cache.index_dim();
  expect(op, "key", args.key, Dtype::f32, {rows, dim});
  expect(op, "gate", args.gate, Dtype::f32, {rows, dim});
  expect_plain(op, "norm_weight", *args.norm_weight, dim, 1);
  expect_plain(op, "norm_bias", *args.norm_bias, dim, 1);
  expect_plain(op, "ape", *args.ape, kpool, dim);

  // Rows of one sequence follow each other: a pool is made of what the ring holds when its last token arrives.
  pool().parallel_for_worker(batch.seqs(), 1, [&](int worker, int64_t begin, int64_t end) {
    float* pooled = worker_scratch(worker).get<float>(static_cast<size_t>(dim));
    for (int64_t index = begin; index < end; ++index) {
      const SeqRows seq = batch.at(index);
      if (seq.slot < 0) continue;
      const auto save = [&](int64_t tokens) {
        for (size_t e = 0; e < seq.export_pos.size(); ++e) {
          if (seq.export_pos[e] == tokens) ring.save(seq.slot, seq.export_snap[e]);
        }
      };
      save(seq.position);
      for (int64_t row = seq.begin; row < seq.end; ++row) {
        const int64_t position = batch.position(row);
        layer_norm(args.key.as<float>() + row * args.key.stride[0], *args.norm_weight, *args.norm_bias, dim,
                   ring.key(seq.slot, position));
        std::copy_n(args.gate.as<float>() + row * args.gate.stride[0], dim, ring.gate(seq.slot, position));
        if (position % kpool == kpool - 1) {
          pool_key(ring, *args.ape, seq.slot, position, kpool, dim, pooled);
          const BlockId block = block_at(*args.batch, *args.caches, index, position, op);
          if (block != BlockId::null) {
            cache.write_pool_key(block, static_cast<int>(position % kBlockTokens / kpool), pooled);
          }
        }
        save(position + 1);
      }
    }
  });
}

void CpuOps::index_select(const IndexSelectArgs& args) {
  const std::string_view op = "index_select";
  const int64_t rows = args.query.dim(0);
  const LatentCache cache(*args.caches, args.layer, op);
  const BatchRows batch(*args.batch, *args.caches, rows, op);
  check_select(op, args, cache.index_dim());
  const Selection selection(args, batch);

  int64_t most = 1;
  for (int64_t row = 0; row < rows; ++row) {
    if (selection.scored(row)) most = std::max(most, selection.candidates(row));
  }
  const int64_t tile = std::clamp<int64_t>(kScoreRoom / most, 1, std::max<int64_t>(rows, 1));
  const int64_t slices = ceil_div(most, kPoolSlice);
  auto* scores = scratch(Area::indexer).get<float>(static_cast<size_t>(tile * most));
  const auto scorer_floats = static_cast<size_t>(Scorer::scratch(args.heads, cache.index_dim()));
  for (int64_t first = 0; first < rows; first += tile) {
    const int64_t count = std::min(tile, rows - first);
    const auto score = [&](int worker, int64_t begin, int64_t end) {
      Scorer scorer(args, cache, worker_scratch(worker).get<float>(scorer_floats));
      for (int64_t task = begin; task < end; ++task) {
        const int64_t at = task / slices, row = first + at, from = task % slices * kPoolSlice;
        const int64_t to = std::min(from + kPoolSlice, selection.candidates(row));
        if (selection.scored(row) && from < to) selection.score(row, from, to, scores + at * most, scorer);
      }
    };
    pool().parallel_for_worker(count * slices, 1, score);
    const auto choose = [&](int worker, int64_t begin, int64_t end) {
      auto* keys = worker_scratch(worker).get<uint64_t>(static_cast<size_t>(most));
      for (int64_t at = begin; at < end; ++at) {
        const int64_t row = first + at;
        selection.choose(row, scores + at * most, keys);
        show_scores(args.scores, row, scores + at * most, selection.candidates(row), batch.padding(row));
      }
    };
    pool().parallel_for_worker(count, 1, choose);
  }
}

}  // namespace glm53::cpu
