// Operators of drafters: rotary embedding, block convolution, context cache and attention of a draft block, candidates
// and the walk through them. Formulas: kernels/draft_ops.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/error.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/row_gemm.h"
#include "kernels/draft_ops.h"

namespace glm53::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

/// A DraftCache whose shape was checked.
class Ring {
 public:
  Ring(const DraftCache& cache, int layer, int64_t width, std::string_view op) : cache_(cache), layer_(layer) {
    expect(op, "cache.keys", cache.keys, Dtype::f32, {-1, -1, -1, width});
    expect(op, "cache.values", cache.values, Dtype::f32,
           {cache.keys.dim(0), cache.keys.dim(1), cache.keys.dim(2), width});
    expect_that(layer >= 0 && layer < cache.keys.dim(1), op, "layer is not of the cache");
    expect_that(cache.keys.contiguous() && cache.values.contiguous(), op, "the cache must be contiguous");
  }
  int64_t slots() const { return cache_.keys.dim(0); }
  int64_t size() const { return cache_.keys.dim(2); }
  float* key(int32_t slot, int64_t position) const { return at(cache_.keys, slot, position); }
  float* value(int32_t slot, int64_t position) const { return at(cache_.values, slot, position); }

 private:
  float* at(const Tensor& t, int32_t slot, int64_t position) const {
    return t.as<float>() + slot * t.stride[0] + layer_ * t.stride[1] + position % size() * t.stride[2];
  }

  const DraftCache& cache_;
  int layer_;
};

void check_slot(std::string_view op, int32_t slot, int64_t slots, int64_t item) {
  if (slot < -1 || slot >= slots)
    throw Error(Code::internal,
                std::string(op) + ": item " + std::to_string(item) + " has slot " + std::to_string(slot),
                "-1 … " + std::to_string(slots - 1));
}

/// Attention of one head over one block; scratch is kept between heads.
class BlockAttention {
 public:
  BlockAttention(const DraftAttentionArgs& args, const Ring& ring) : a_(args), ring_(ring) {}

  void run(int64_t b, int64_t head) {
    const auto slot = a_.slot.as<const int32_t>()[b];
    const int64_t position = a_.position.as<const int32_t>()[b], end = a_.end.as<const int32_t>()[b];
    const int64_t begin = std::max<int64_t>(a_.begin.as<const int32_t>()[b], position - a_.window + 1);
    const int64_t context = std::max<int64_t>(end - begin, 0), keys = context + a_.block;
    const int64_t at = head / (a_.heads / (a_.k.dim(1) / a_.dim)) * a_.dim;
    keys_.clear();
    values_.clear();
    for (int64_t t = begin; t < end; ++t) {
      keys_.push_back(ring_.key(slot, t) + at);
      values_.push_back(ring_.value(slot, t) + at);
    }
    for (int64_t i = 0; i < a_.block; ++i) {
      keys_.push_back(row(a_.k, b, i) + at);
      values_.push_back(row(a_.v, b, i) + at);
    }
    weight_.resize(static_cast<size_t>(a_.block * keys));
    row_dots({row(a_.q, b, 0) + head * a_.dim, a_.q.stride[0]}, keys_, {weight_.data(), keys}, a_.block, a_.dim);
    for (int64_t i = 0; i < a_.block; ++i) {
      // Later rows see less of the context.
      const int64_t first = std::clamp<int64_t>(position + i - a_.window + 1 - begin, 0, context);
      float* w = weight_.data() + i * keys + first;
      const int64_t n = keys - first;
      const float total = weigh(w, n);
      float* out = row(a_.out, b, i) + head * a_.dim;
      row_gemm({w, n}, std::span(values_).subspan(static_cast<size_t>(first)), {out, a_.dim}, 1, a_.dim, false);
      for (int64_t d = 0; d < a_.dim; ++d) out[d] /= total;
    }
  }

 private:
  float* row(const Tensor& t, int64_t b, int64_t i) const { return t.as<float>() + (b * a_.block + i) * t.stride[0]; }

  /// Scores to weights relative to the largest; their sum.
  float weigh(float* w, int64_t n) const {
    float largest = kNone, total = 0;
    for (int64_t j = 0; j < n; ++j) {
      w[j] *= a_.scale;
      largest = std::max(largest, w[j]);
    }
    for (int64_t j = 0; j < n; ++j) {
      w[j] = std::exp(w[j] - largest);
      total += w[j];
    }
    return total;
  }

  const DraftAttentionArgs& a_;
  const Ring& ring_;
  std::vector<const float*> keys_, values_;
  std::vector<float> weight_;
};

void check_block(const DraftAttentionArgs& a, const Ring& ring, int64_t b) {
  const auto slot = a.slot.as<const int32_t>()[b];
  check_slot("draft_attention", slot, ring.slots(), b);
  const int32_t position = a.position.as<const int32_t>()[b], begin = a.begin.as<const int32_t>()[b],
                end = a.end.as<const int32_t>()[b];
  if (slot >= 0 && (begin < 0 || end < begin || position < end || end - begin > ring.size()))
    throw Error(Code::internal, "draft_attention: block " + std::to_string(b) + " at position " +
                                    std::to_string(position) + " has context " + std::to_string(begin) + " to " +
                                    std::to_string(end) + " in a ring of " + std::to_string(ring.size()));
}

}  // namespace

void CpuOps::rope(const RopeArgs& args) {
  expect("rope", "x", args.x, Dtype::f32, {-1, -1});
  const int64_t rows = args.x.dim(0), width = args.x.dim(1), dim = args.dim, half = dim / 2;
  expect("rope", "position", args.position, Dtype::i32, {rows});
  expect_that(dim > 0 && dim % 2 == 0 && width % dim == 0, "rope", "dim must be even and divide the width of x");
  expect_that(args.theta > 0, "rope", "theta must be positive");
  pool().parallel_for(rows, 1, [&](int64_t first, int64_t last) {
    std::vector<float> cosine(static_cast<size_t>(half)), sine(cosine.size());
    for (int64_t r = first; r < last; ++r) {
      const double position = args.position.as<const int32_t>()[r];
      for (int64_t j = 0; j < half; ++j) {
        const double angle = position * std::pow(args.theta, -2.0 * static_cast<double>(j) / static_cast<double>(dim));
        cosine[static_cast<size_t>(j)] = static_cast<float>(std::cos(angle));
        sine[static_cast<size_t>(j)] = static_cast<float>(std::sin(angle));
      }
      float* x = args.x.as<float>() + r * args.x.stride[0];
      for (int64_t head = 0; head < width; head += dim) {
        for (int64_t j = 0; j < half; ++j) {
          const float c = cosine[static_cast<size_t>(j)], s = sine[static_cast<size_t>(j)];
          const float low = x[head + j], high = x[head + j + half];
          x[head + j] = low * c - high * s;
          x[head + j + half] = high * c + low * s;
        }
      }
    }
  });
}

void CpuOps::block_conv(const BlockConvArgs& args) {
  const std::string_view op = "block_conv";
  expect(op, "x", args.x, Dtype::f32, {-1, -1});
  const int64_t rows = args.x.dim(0), n = args.x.dim(1);
  expect_that(args.block > 0 && args.kernel > 0 && args.group > 0 && rows % args.block == 0 && n % args.group == 0, op,
              "block must divide the rows, group the width, and kernel be positive");
  expect_that(args.side == 0 || args.side == 1, op, "side must be 0 or 1");
  const int64_t groups = n / args.group, taps = args.kernel;
  expect(op, "delta", args.delta, Dtype::f32, {rows, 2 * taps * groups});
  expect(op, "out", args.out, Dtype::f32, {rows, n});
  expect_plain(op, "base", *args.base, args.base->out, args.base->in);
  expect_that(args.base->out * args.base->in == 2 * taps * n, op, "base must hold 2 · kernel · width values");
  pool().parallel_for(rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      float* out = args.out.as<float>() + r * args.out.stride[0];
      std::fill_n(out, n, 0.0F);
      const int64_t seen = std::min<int64_t>(taps, r % args.block + 1);
      for (int64_t j = 0; j < seen; ++j) {
        const int64_t tap = args.side * taps + j;
        const float* x = args.x.as<const float>() + (r - j) * args.x.stride[0];
        const float* delta = args.delta.as<const float>() + r * args.delta.stride[0] + tap * groups;
        for (int64_t c = 0; c < n; ++c) out[c] += (value_at(*args.base, tap * n + c) + delta[c / args.group]) * x[c];
      }
    }
  });
}

void CpuOps::draft_write(const DraftWriteArgs& args) {
  const std::string_view op = "draft_write";
  expect(op, "k", args.k, Dtype::f32, {-1, -1});
  const int64_t rows = args.k.dim(0), width = args.k.dim(1);
  expect(op, "v", args.v, Dtype::f32, {rows, width});
  expect(op, "slot", args.slot, Dtype::i32, {rows});
  expect(op, "position", args.position, Dtype::i32, {rows});
  const Ring ring(*args.cache, args.layer, width, op);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t slot = args.slot.as<const int32_t>()[r], position = args.position.as<const int32_t>()[r];
    check_slot(op, slot, ring.slots(), r);
    if (slot < 0) continue;
    expect_that(position >= 0, op, "positions count from 0");
    std::copy_n(args.k.as<const float>() + r * args.k.stride[0], width, ring.key(slot, position));
    std::copy_n(args.v.as<const float>() + r * args.v.stride[0], width, ring.value(slot, position));
  }
}

void CpuOps::draft_attention(const DraftAttentionArgs& args) {
  const std::string_view op = "draft_attention";
  expect(op, "slot", args.slot, Dtype::i32, {-1});
  const int64_t blocks = args.slot.dim(0), rows = blocks * args.block;
  expect_that(args.block > 0 && args.heads > 0 && args.dim > 0 && args.window > 0, op,
              "block, heads, dim and window must be positive");
  expect(op, "q", args.q, Dtype::f32, {rows, int64_t{args.heads} * args.dim});
  expect(op, "out", args.out, Dtype::f32, {rows, int64_t{args.heads} * args.dim});
  expect(op, "k", args.k, Dtype::f32, {rows, -1});
  expect(op, "v", args.v, Dtype::f32, {rows, args.k.dim(1)});
  const int64_t width = args.k.dim(1);
  expect_that(width > 0 && width % args.dim == 0 && args.heads % (width / args.dim) == 0, op,
              "the heads of k must divide those of q");
  for (const Tensor& t : {args.position, args.begin, args.end}) expect(op, "position", t, Dtype::i32, {blocks});
  const Ring ring(*args.cache, args.layer, width, op);
  for (int64_t b = 0; b < blocks; ++b) check_block(args, ring, b);
  pool().parallel_for(blocks * args.heads, 1, [&](int64_t first, int64_t last) {
    BlockAttention attention(args, ring);
    for (int64_t task = first; task < last; ++task)
      if (args.slot.as<const int32_t>()[task / args.heads] >= 0) attention.run(task / args.heads, task % args.heads);
  });
  for (int64_t r = 0; r < rows; ++r)
    if (args.slot.as<const int32_t>()[r / args.block] < 0)
      std::fill_n(args.out.as<float>() + r * args.out.stride[0], args.out.dim(1), 0.0F);
}

void CpuOps::top_logits(const TopLogitsArgs& args) {
  const std::string_view op = "top_logits";
  expect(op, "logits", args.logits, Dtype::f32, {-1, -1});
  const int64_t rows = args.logits.dim(0), n = args.logits.dim(1);
  if (!args.id.empty()) expect(op, "id", args.id, Dtype::i32, {rows, n});
  expect(op, "value", args.value, Dtype::f32, {rows, -1});
  const int64_t k = args.value.dim(1);
  expect(op, "index", args.index, Dtype::i32, {rows, k});
  pool().parallel_for(rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* x = args.logits.as<const float>() + r * args.logits.stride[0];
      const int32_t* id = args.id.empty() ? nullptr : args.id.as<const int32_t>() + r * args.id.stride[0];
      float* value = args.value.as<float>() + r * args.value.stride[0];
      int32_t* index = args.index.as<int32_t>() + r * args.index.stride[0];
      std::fill_n(value, k, kNone);
      std::fill_n(index, k, -1);
      for (int64_t j = 0; j < n; ++j) {
        const int32_t own = id != nullptr ? id[j] : args.first + static_cast<int32_t>(j);
        // The first comparison also leaves out NaN.
        if (!(x[j] > kNone) || (k > 0 && index[k - 1] >= 0 && x[j] < value[k - 1])) continue;
        int64_t at = k;
        while (at > 0 && (x[j] > value[at - 1] || (x[j] == value[at - 1] && own < index[at - 1]))) --at;
        for (int64_t i = k - 1; i > at; --i) {
          value[i] = value[i - 1];
          index[i] = index[i - 1];
        }
        if (at == k) continue;
        value[at] = x[j];
        index[at] = own;
      }
    }
  });
}

void CpuOps::selector_walk(const SelectorWalkArgs& args) {
  const std::string_view op = "selector_walk";
  expect(op, "anchor", args.anchor, Dtype::i32, {-1});
  expect(op, "unary", args.unary, Dtype::f32, {-1, -1});
  const int64_t blocks = args.anchor.dim(0), rows = args.unary.dim(0), k = args.unary.dim(1);
  expect_that(blocks > 0 && rows % blocks == 0, op, "every sequence needs the same number of positions");
  expect(op, "candidate", args.candidate, Dtype::i32, {rows, k});
  expect(op, "score", args.score, Dtype::f32, {rows, k});
  expect(op, "token", args.token, Dtype::i32, {rows});
  expect(op, "hidden", args.hidden, Dtype::f32, {rows, -1});
  const int64_t rank = args.hidden.dim(1), vocab = args.predecessor->out;
  expect_plain(op, "predecessor", *args.predecessor, vocab, rank);
  expect_plain(op, "successor", *args.successor, vocab, rank);
  const int64_t steps = rows / blocks;
  pool().parallel_for(blocks, 1, [&](int64_t first, int64_t last) {
    std::vector<float> edge(static_cast<size_t>(rank)), to(edge.size());
    for (int64_t r = first * steps; r < last * steps; ++r) {
      auto* token = args.token.as<int32_t>();
      const int32_t previous = r % steps == 0 ? args.anchor.as<const int32_t>()[r / steps] : token[r - 1];
      if (previous >= vocab)
        throw Error(Code::internal, "selector_walk: token " + std::to_string(previous),
                    "-1 … " + std::to_string(vocab - 1));
      const float* hidden = args.hidden.as<const float>() + r * args.hidden.stride[0];
      for (int64_t i = 0; i < rank && previous >= 0; ++i)
        edge[static_cast<size_t>(i)] = value_at(*args.predecessor, previous * rank + i) * hidden[i];
      const float* unary = args.unary.as<const float>() + r * args.unary.stride[0];
      const int32_t* candidate = args.candidate.as<const int32_t>() + r * args.candidate.stride[0];
      float* score = args.score.as<float>() + r * args.score.stride[0];
      token[r] = -1;
      float best = kNone;
      for (int64_t c = 0; c < k; ++c) {
        score[c] = kNone;
        if (previous < 0 || candidate[c] < 0) continue;
        for (int64_t i = 0; i < rank; ++i)
          to[static_cast<size_t>(i)] = value_at(*args.successor, candidate[c] * rank + i);
        score[c] = unary[c] + dot(edge.data(), to.data(), rank);
        if (score[c] > best) {
          best = score[c];
          token[r] = candidate[c];
        }
      }
    }
  });
}

}  // namespace glm53::cpu
