// Absorbed latent attention over selected pools (spec model §5.1, runtime §2.1–2.3).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "common/error.h"
#include "kernels/cpu/batch_rows.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/latent_cache.h"
#include "kernels/cpu/row_gemm.h"
#include "kernels/half.h"

namespace glm53::cpu {
namespace {

constexpr int64_t kTile = 32;        // tokens of one softmax step; the only split, so it follows from the context alone
constexpr int64_t kHeadGroup = 8;    // heads of one task when there are few rows
constexpr int64_t kColumns = 64;     // latent columns of one mla_absorb task
constexpr int64_t kWeightRows = 16;  // weight rows that mla_expand widens at once

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Tokens that a row attends to, in ascending order: its pools, then the incomplete tail.
class AttendedTokens {
 public:
  AttendedTokens(const MlaSparseArgs& args, const BatchRows& batch, int64_t row)
      : kpool_(args.caches->geometry.kpool),
        pools_(args.selected.as<const int32_t>() + row * args.selected.stride[0]),
        selected_(args.n_selected.as<const int32_t>()[row]) {
    const int64_t visible = int64_t{batch.position(row)} + 1;
    tail_ = visible - visible % kpool_;
    count_ = selected_ * kpool_ + visible % kpool_;
    bool ok = selected_ >= 0 && selected_ <= args.selected.dim(1) && count_ > 0;
    for (int64_t i = 0; ok && i < selected_; ++i) {
      ok = pools_[i] >= 0 && pools_[i] < visible / kpool_ && (i == 0 || pools_[i] > pools_[i - 1]);
    }
    if (!ok) {
      throw Error(Code::internal,
                  "mla_sparse: selection of row " + std::to_string(row) + " (" + std::to_string(selected_) + " pools)",
                  "expected ascending complete pools before token " + std::to_string(visible) + ", or a tail");
    }
  }
  int64_t count() const { return count_; }
  int64_t operator[](int64_t i) const {
    const int64_t pool = i / kpool_;
    return pool < selected_ ? pools_[pool] * kpool_ + i % kpool_ : tail_ + (i - selected_ * kpool_);
  }

 private:
  int64_t kpool_;
  const int32_t* pools_;
  int64_t selected_, tail_ = 0, count_ = 0;
};

// Softmax attention of some heads of one row, tile by tile with a running maximum.
class Attention {
 public:
  static int64_t scratch(int64_t heads, int64_t latent) { return kTile * latent + heads * kTile + 2 * heads; }

  Attention(const MlaSparseArgs& args, const LatentCache& cache, int64_t heads, float* at)
      : args_(args), cache_(cache), latent_(cache.latent()), heads_(heads) {
    rows_ = at;  // [kTile][latent]
    weight_ = rows_ + kTile * latent_;
    largest_ = weight_ + heads * kTile;
    total_ = largest_ + heads;
  }

  void run(const BatchRows& batch, int64_t row, int64_t first_head, int64_t heads) {
    heads_ = heads;
    const AttendedTokens tokens(args_, batch, row);
    const float* q = args_.q_latent.as<float>() + row * args_.q_latent.stride[0] + first_head * latent_;
    float* out = args_.out.as<float>() + row * args_.out.stride[0] + first_head * latent_;
    std::fill_n(largest_, heads_, -std::numeric_limits<float>::infinity());
    std::fill_n(total_, heads_, 0.0F);
    std::fill_n(out, heads_ * latent_, 0.0F);
    for (int64_t begin = 0; begin < tokens.count(); begin += kTile) {
      const int64_t n = std::min(kTile, tokens.count() - begin);
      gather(batch.seq_of(row), tokens, begin, n);
      const std::span<const float* const> latents(latents_.data(), static_cast<size_t>(n));
      row_dots({q, latent_}, latents, {weight_, kTile}, heads_, latent_);
      for (int64_t h = 0; h < heads_; ++h) weigh(h, n, out + h * latent_);
      row_gemm({weight_, kTile}, latents, {out, latent_}, heads_, latent_, true);
    }
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t i = 0; i < latent_; ++i) out[h * latent_ + i] /= total_[h];
    }
  }

 private:
  void gather(int64_t seq, const AttendedTokens& tokens, int64_t begin, int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
      const int64_t position = tokens[begin + j];
      const BlockId block = block_at(*args_.batch, *args_.caches, seq, position, "mla_sparse");
      latents_[static_cast<size_t>(j)] =
          cache_.latent_of(block, static_cast<int>(position % kBlockTokens), rows_ + j * latent_);
    }
  }

  // Turns the tile's scores of one head into weights relative to the running maximum.
  void weigh(int64_t head, int64_t n, float* out) {
    float* w = weight_ + head * kTile;
    float largest = largest_[head];
    for (int64_t j = 0; j < n; ++j) {
      w[j] *= args_.scale;
      largest = std::max(largest, w[j]);
    }
    if (largest > largest_[head]) {
      const float shrink = std::exp(largest_[head] - largest);  // 0 in the first tile
      for (int64_t i = 0; i < latent_; ++i) out[i] *= shrink;
      total_[head] *= shrink;
      largest_[head] = largest;
    }
    for (int64_t j = 0; j < n; ++j) {
      w[j] = std::exp(w[j] - largest);
      total_[head] += w[j];
    }
  }

  const MlaSparseArgs& args_;
  const LatentCache& cache_;
  int64_t latent_, heads_;
  std::array<const float*, kTile> latents_{};  // of the tile
  float *rows_, *weight_, *largest_, *total_;
};

// to[i] = element i of a plain weight, counted from `first`.
GLM53_CLONES void widen(const Weight& w, int64_t first, int64_t n, float* to) {
  if (w.format == WeightFormat::f32) {
    std::memcpy(to, w.codes.as<const float>() + first, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* from = w.codes.as<const uint16_t>() + first;
  for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_f32(from[i]);
}

void check_kv_b(std::string_view op, const Weight& w, int heads, int nope, int v) {
  expect_that(heads > 0 && nope > 0 && v > 0 && w.in > 0, op, "heads, nope, v and latent must be positive");
  expect_plain(op, "kv_b", w, int64_t{heads} * (nope + v), w.in);
}

}  // namespace

void CpuOps::latent_write(const LatentWriteArgs& args) {
  const std::string_view op = "latent_write";
  const int64_t rows = args.latent.dim(0);
  const LatentCache cache(*args.caches, args.layer, op);
  const BatchRows batch(*args.batch, *args.caches, rows, op);
  expect(op, "latent", args.latent, Dtype::f32, {rows, cache.latent()});
  pool().parallel_for(batch.rows(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (batch.padding(row)) continue;
      const int32_t position = batch.position(row);
      const BlockId block = block_at(*args.batch, *args.caches, batch.seq_of(row), position, op);
      if (block == BlockId::null) continue;
      cache.write_latent(block, position % kBlockTokens, args.latent.as<float>() + row * args.latent.stride[0]);
    }
  });
}

void CpuOps::mla_absorb(const MlaAbsorbArgs& args) {
  const std::string_view op = "mla_absorb";
  check_kv_b(op, *args.kv_b, args.heads, args.nope, args.v);
  const int64_t rows = args.q.dim(0), latent = args.kv_b->in, nope = args.nope;
  expect(op, "q", args.q, Dtype::f32, {rows, args.heads * nope});
  expect(op, "out", args.out, Dtype::f32, {rows, args.heads * latent});
  const int64_t slices = ceil_div(latent, kColumns);
  pool().parallel_for_worker(args.heads * slices, 1, [&](int worker, int64_t begin, int64_t end) {
    float* w = worker_scratch(worker).get<float>(static_cast<size_t>(nope * kColumns));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / slices, first = task % slices * kColumns;
      const int64_t columns = std::min(kColumns, latent - first);
      for (int64_t i = 0; i < nope; ++i) {
        widen(*args.kv_b, (head * (nope + args.v) + i) * latent + first, columns, w + i * columns);
      }
      const ConstMatrix q{args.q.as<float>() + head * nope, args.q.stride[0]};
      const Matrix out{args.out.as<float>() + head * latent + first, args.out.stride[0]};
      row_gemm(q, {w, columns}, out, rows, nope, columns, false);
    }
  });
}

void CpuOps::mla_sparse(const MlaSparseArgs& args) {
  const std::string_view op = "mla_sparse";
  const int64_t rows = args.q_latent.dim(0), heads = args.heads;
  const LatentCache cache(*args.caches, args.layer, op);
  const BatchRows batch(*args.batch, *args.caches, rows, op);
  expect_that(heads > 0, op, "heads must be positive");
  expect(op, "q_latent", args.q_latent, Dtype::f32, {rows, heads * cache.latent()});
  expect(op, "out", args.out, Dtype::f32, {rows, heads * cache.latent()});
  expect(op, "selected", args.selected, Dtype::i32, {rows, -1});
  expect(op, "n_selected", args.n_selected, Dtype::i32, {rows});

  // Heads do not meet, so grouping them changes no bit; few rows need the groups to feed all threads.
  const int64_t group = batch.rows() >= 4 * pool().threads() ? heads : std::min(heads, kHeadGroup);
  const int64_t groups = ceil_div(heads, group);
  const auto body = [&](int worker, int64_t begin, int64_t end) {
    float* memory = worker_scratch(worker).get<float>(static_cast<size_t>(Attention::scratch(group, cache.latent())));
    Attention attention(args, cache, group, memory);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / groups, first = task % groups * group;
      if (!batch.padding(row)) attention.run(batch, row, first, std::min(group, heads - first));
    }
  };
  pool().parallel_for_worker(batch.rows() * groups, 1, body);
  for (int64_t row = 0; row < rows; ++row) {
    if (batch.padding(row)) zero_rows(args.out, row, row + 1);
  }
}

void CpuOps::mla_expand(const MlaExpandArgs& args) {
  const std::string_view op = "mla_expand";
  check_kv_b(op, *args.kv_b, args.heads, args.nope, args.v);
  const int64_t rows = args.a.dim(0), latent = args.kv_b->in, v = args.v;
  expect(op, "a", args.a, Dtype::f32, {rows, args.heads * latent});
  expect(op, "out", args.out, Dtype::f32, {rows, args.heads * v});
  const int64_t slices = ceil_div(v, kWeightRows);
  pool().parallel_for_worker(args.heads * slices, 1, [&](int worker, int64_t begin, int64_t end) {
    float* w = worker_scratch(worker).get<float>(static_cast<size_t>(kWeightRows * latent));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / slices, first = task % slices * kWeightRows, n = std::min(kWeightRows, v - first);
      widen(*args.kv_b, (head * (args.nope + v) + args.nope + first) * latent, n * latent, w);
      for (int64_t row = 0; row < rows; ++row) {
        const float* a = args.a.as<float>() + row * args.a.stride[0] + head * latent;
        float* out = args.out.as<float>() + row * args.out.stride[0] + head * v + first;
        for (int64_t i = 0; i < n; ++i) out[i] = dot(w + i * latent, a, latent);
      }
    }
  });
}

}  // namespace glm53::cpu
