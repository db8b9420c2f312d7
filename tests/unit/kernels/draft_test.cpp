// Operators of drafters against fp64: rope, block_conv, draft_write, draft_attention, top_logits, selector_walk.
#include <numeric>
#include <utility>

#include "kernels/draft_ops.h"
#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

double d(float x) {
  return static_cast<double>(x);
}

TEST_CASE("rope: halves, every head alike, views, far positions") {
  Random random(11);
  const auto ops = make_cpu_ops(2);
  for (const int dim : {2, 6, 64}) {
    for (const int heads : {1, 3}) {
      const int64_t width = int64_t{dim} * heads;
      Ints position = {0, 1, 17, 130000, 1048575};
      const int64_t rows = std::ssize(position);
      Floats x = random.normals(rows * (width + 3));
      const Floats before = x;
      ops->rope({.x = tensor(x, {rows, width + 3}).columns(1, width + 1),
                 .position = tensor(position, {rows}),
                 .dim = dim,
                 .theta = 10000});
      double worst = 0;
      for (int64_t r = 0; r < rows; ++r) {
        CHECK(x[at(r * (width + 3))] == before[at(r * (width + 3))]);
        CHECK(x[at(r * (width + 3) + width + 2)] == before[at(r * (width + 3) + width + 2)]);
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t j = 0; j < dim / 2; ++j) {
            const int64_t i = r * (width + 3) + 1 + h * dim + j;
            const double phi = position[at(r)] * std::pow(10000.0, -2.0 * static_cast<double>(j) / dim);
            const double low = d(before[at(i)]), high = d(before[at(i + dim / 2)]);
            worst = std::max(worst, std::fabs(d(x[at(i)]) - (low * std::cos(phi) - high * std::sin(phi))));
            worst = std::max(worst, std::fabs(d(x[at(i + dim / 2)]) - (high * std::cos(phi) + low * std::sin(phi))));
          }
        }
      }
      CHECK(worst < 2e-6);
    }
  }
}

struct Conv {
  int block, kernel, group;
  int64_t blocks, hidden;
};

TEST_CASE("block_conv: oracle, both sides, block borders") {
  Random random(12);
  for (const Conv& c : {Conv{8, 2, 4, 3, 32}, Conv{5, 3, 1, 2, 7}, Conv{1, 2, 3, 4, 9}, Conv{8, 1, 16, 1, 16}}) {
    for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
      const int64_t rows = c.blocks * c.block, groups = c.hidden / c.group, deltas = 2 * c.kernel * groups;
      TestWeight base(format, 2, c.kernel * c.hidden, random);
      Floats x = random.normals(rows * c.hidden), delta = random.normals(rows * deltas);
      for (const int side : {0, 1}) {
        Floats out(x.size(), NAN), alone(at(c.block * c.hidden), NAN);
        Doubles want(x.size());
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < c.hidden; ++i)
            for (int64_t j = 0; j < c.kernel && j <= r % c.block; ++j) {
              const int64_t tap = side * c.kernel + j;
              want[at(r * c.hidden + i)] +=
                  (base.dense[at(tap * c.hidden + i)] + d(delta[at(r * deltas + tap * groups + i / c.group)])) *
                  d(x[at((r - j) * c.hidden + i)]);
            }
        BlockConvArgs args{.x = tensor(x, {rows, c.hidden}),
                           .delta = tensor(delta, {rows, deltas}),
                           .base = &base.w,
                           .side = side,
                           .block = c.block,
                           .kernel = c.kernel,
                           .group = c.group,
                           .out = tensor(out, {rows, c.hidden})};
        make_cpu_ops(3)->block_conv(args);
        CHECK(relative_error(out, want) < 2e-6);
        args.x = args.x.rows(rows - c.block, rows);
        args.delta = args.delta.rows(rows - c.block, rows);
        args.out = tensor(alone, {c.block, c.hidden});
        make_cpu_ops(1)->block_conv(args);
        CHECK(same_bits(alone, std::span(out).last(alone.size())));
      }
    }
  }
}

TEST_CASE("block_conv: a row alters itself and later rows of its block only") {
  Random random(13);
  const auto ops = make_cpu_ops(1);
  TestWeight base(WeightFormat::f32, 2, 2 * 16, random);
  Floats x = random.normals(16 * 16), delta = random.normals(int64_t{16} * 16), before(x.size(), NAN), after(before);
  BlockConvArgs args{.x = tensor(x, {16, 16}),
                     .delta = tensor(delta, {16, 16}),
                     .base = &base.w,
                     .side = 1,
                     .block = 8,
                     .kernel = 2,
                     .group = 4,
                     .out = tensor(before, {16, 16})};
  ops->block_conv(args);
  for (int64_t changed = 0; changed < 16; ++changed) {
    const float kept = std::exchange(x[at(changed * 16 + 3)], 2.0F);
    args.out = tensor(after, {16, 16});
    ops->block_conv(args);
    x[at(changed * 16 + 3)] = kept;
    for (int64_t r = 0; r < 16; ++r) {
      const bool seen = r == changed || (r == changed + 1 && r % 8 != 0);
      CHECK(same_bits(std::span(before).subspan(at(r * 16), 16), std::span(after).subspan(at(r * 16), 16)) == !seen);
    }
  }
}

/// A context cache full of NaN, and what was put into it.
struct Context {
  static constexpr int64_t kSlots = 3, kLayers = 2;
  int64_t ring, width;
  Floats keys, values;
  DraftCache cache;

  Context(int64_t ring_size, int64_t kv_width)
      : ring(ring_size), width(kv_width), keys(at(kSlots * kLayers * ring * width), NAN), values(keys) {
    cache.keys = tensor(keys, {kSlots, kLayers, ring, width});
    cache.values = tensor(values, {kSlots, kLayers, ring, width});
  }
  const float* key(int slot, int layer, int64_t position) const {
    return keys.data() + ((slot * kLayers + layer) * ring + position % ring) * width;
  }
  const float* value(int slot, int layer, int64_t position) const {
    return values.data() + ((slot * kLayers + layer) * ring + position % ring) * width;
  }
};

TEST_CASE("draft_write: rows to their places, slot -1 to none") {
  Random random(14);
  Context context(16, 6);
  Ints slot = {2, -1, 0, 2, 1}, position = {15, 3, 16, 17, 1000003};
  Floats k = random.normals(5 * 6), v = random.normals(5 * 6);
  make_cpu_ops(2)->draft_write({.cache = &context.cache,
                                .layer = 1,
                                .slot = tensor(slot, {5}),
                                .position = tensor(position, {5}),
                                .k = tensor(k, {5, 6}),
                                .v = tensor(v, {5, 6})});
  int64_t written = 0;
  for (const float x : context.keys) written += std::isnan(x) ? 0 : 1;
  CHECK(written == 4 * 6);
  for (const int64_t r : {0, 2, 3, 4}) {
    CHECK(std::equal(k.data() + r * 6, k.data() + r * 6 + 6, context.key(slot[at(r)], 1, position[at(r)])));
    CHECK(std::equal(v.data() + r * 6, v.data() + r * 6 + 6, context.value(slot[at(r)], 1, position[at(r)])));
  }
  CHECK_THROWS_AS(make_cpu_ops(1)->draft_write({.cache = &context.cache,
                                                .layer = 2,
                                                .slot = tensor(slot, {5}),
                                                .position = tensor(position, {5}),
                                                .k = tensor(k, {5, 6}),
                                                .v = tensor(v, {5, 6})}),
                  Error);
}

/// Blocks with the same shapes: their inputs, and attention in fp64 straight from the definition.
struct Blocks {
  int block, heads, kv, dim, window;
  Ints slot{}, position{}, begin{}, end{};
  Floats q{}, k{}, v{};

  int64_t rows() const { return std::ssize(slot) * block; }
  DraftAttentionArgs args(Context& context, Floats& out) {
    const int64_t b = std::ssize(slot);
    return {.cache = &context.cache,
            .layer = 1,
            .q = tensor(q, {rows(), heads * dim}),
            .k = tensor(k, {rows(), kv * dim}),
            .v = tensor(v, {rows(), kv * dim}),
            .slot = tensor(slot, {b}),
            .position = tensor(position, {b}),
            .begin = tensor(begin, {b}),
            .end = tensor(end, {b}),
            .block = block,
            .heads = heads,
            .dim = dim,
            .window = window,
            .scale = 0.3F,
            .out = tensor(out, {rows(), heads * dim})};
  }
  Doubles oracle(const Context& context) const {
    Doubles out(at(rows() * heads * dim));
    for (int64_t r = 0; r < rows(); ++r) {
      const int64_t b = r / block;
      if (slot[at(b)] < 0) continue;
      for (int h = 0; h < heads; ++h) {
        const int64_t shared = int64_t{h / (heads / kv)} * dim;
        double total = 0;
        Doubles sum(at(dim));
        const auto see = [&](const float* key, const float* value) {
          double score = 0;
          for (int64_t i = 0; i < dim; ++i) score += d(q[at((r * heads + h) * dim + i)]) * d(key[shared + i]);
          const double w = std::exp(d(0.3F) * score);
          total += w;
          for (int64_t i = 0; i < dim; ++i) sum[at(i)] += w * d(value[shared + i]);
        };
        for (int64_t t = begin[at(b)]; t < end[at(b)]; ++t)
          if (position[at(b)] + r % block - t < window)
            see(context.key(slot[at(b)], 1, t), context.value(slot[at(b)], 1, t));
        for (int64_t i = 0; i < block; ++i) {
          const int64_t other = (b * block + i) * kv * dim;
          see(k.data() + other, v.data() + other);
        }
        for (int64_t i = 0; i < dim; ++i) out[at((r * heads + h) * dim + i)] = sum[at(i)] / total;
      }
    }
    return out;
  }
};

TEST_CASE("draft_attention: context, window, block in both directions; nothing else is read") {
  Random random(15);
  for (const auto& [heads, kv, dim] : {std::tuple{4, 2, 8}, {3, 3, 5}, {6, 1, 2}}) {
    Context context(48, int64_t{kv} * dim);
    // Nothing; all of a short context; longer than the window; behind the wrap; a hole before the block; padding.
    Blocks b{.block = 8, .heads = heads, .kv = kv, .dim = dim, .window = 20, .slot = {0, 1, 2, 0, 1, -1, 2}};
    b.position = {0, 7, 31, 100, 12, 5, 19};
    b.begin = {0, 0, 0, 60, 3, 0, 0};
    b.end = {0, 7, 31, 100, 9, 5, 19};
    b.q = random.normals(b.rows() * heads * dim);
    b.k = random.normals(b.rows() * kv * dim);
    b.v = random.normals(b.rows() * kv * dim);
    // Blocks of one slot never have the same context at the same time: each is run on its own cache contents.
    for (size_t i = 0; i < b.slot.size(); ++i) {
      std::fill(context.keys.begin(), context.keys.end(), NAN);
      std::fill(context.values.begin(), context.values.end(), NAN);
      Blocks one = b;
      const auto part = [&](const Floats& all) {
        const size_t n = all.size() / b.slot.size();
        return Floats(all.begin() + static_cast<ptrdiff_t>(i * n), all.begin() + static_cast<ptrdiff_t>((i + 1) * n));
      };
      for (auto member : {&Blocks::slot, &Blocks::position, &Blocks::begin, &Blocks::end})
        one.*member = {(b.*member)[i]};
      for (auto member : {&Blocks::q, &Blocks::k, &Blocks::v}) one.*member = part(b.*member);
      // Only what the first row may see is written; the rest stays NaN.
      const int64_t first = std::max(one.begin[0], one.position[0] - one.window + 1);
      for (int64_t t = first; t < one.end[0]; ++t) {
        Ints slot = {one.slot[0]}, position = {static_cast<int32_t>(t)};
        Floats k = random.normals(int64_t{kv} * dim), v = random.normals(int64_t{kv} * dim);
        make_cpu_ops(1)->draft_write({.cache = &context.cache,
                                      .layer = 1,
                                      .slot = tensor(slot, {1}),
                                      .position = tensor(position, {1}),
                                      .k = tensor(k, {1, int64_t{kv} * dim}),
                                      .v = tensor(v, {1, int64_t{kv} * dim})});
      }
      Floats out(at(one.rows() * heads * dim), NAN), three(out);
      make_cpu_ops(1)->draft_attention(one.args(context, out));
      CAPTURE(i);
      CHECK(relative_error(out, one.oracle(context)) < 3e-6);
      make_cpu_ops(3)->draft_attention(one.args(context, three));
      CHECK(same_bits(out, three));
    }
  }
}

TEST_CASE("draft_attention: a block among others has the same bits as alone; bad ranges are refused") {
  Random random(16);
  Context context(32, 4);
  for (float& x : context.keys) x = random.normal();
  for (float& x : context.values) x = random.normal();
  Blocks b{.block = 8, .heads = 2, .kv = 1, .dim = 4, .window = 16, .slot = {0, -1, 2}};
  b.position = {20, 0, 40};
  b.begin = {0, 0, 10};
  b.end = {20, 0, 40};
  b.q = random.normals(b.rows() * 8);
  b.k = random.normals(b.rows() * 4);
  b.v = random.normals(b.rows() * 4);
  Floats all(at(b.rows() * 8), NAN), alone(at(8 * 8), NAN);
  make_cpu_ops(1)->draft_attention(b.args(context, all));
  CHECK(all_zero(std::span(all).subspan(64, 64)));
  Blocks last = b;
  last.slot = {2};
  last.position = {40};
  last.begin = {10};
  last.end = {40};
  last.q.erase(last.q.begin(), last.q.begin() + 128);
  last.k.erase(last.k.begin(), last.k.begin() + 64);
  last.v.erase(last.v.begin(), last.v.begin() + 64);
  make_cpu_ops(1)->draft_attention(last.args(context, alone));
  CHECK(same_bits(alone, std::span(all).last(64)));
  for (const auto& [begin, end] : {std::pair{10, 41}, {41, 40}, {-1, 10}, {0, 33}}) {
    last.begin = {begin};
    last.end = {end};
    CHECK_THROWS_AS(make_cpu_ops(1)->draft_attention(last.args(context, alone)), Error);
  }
}

TEST_CASE("draft_attention: the last row of a block changes the first, and no other block") {
  Random random(20);
  Context context(32, 4);
  Blocks b{.block = 8, .heads = 2, .kv = 1, .dim = 4, .window = 16, .slot = {0, 1}};
  b.position = b.begin = b.end = {3, 5};
  b.q = random.normals(b.rows() * 8);
  b.k = random.normals(b.rows() * 4);
  b.v = random.normals(b.rows() * 4);
  Floats before(at(b.rows() * 8), NAN), after(before);
  make_cpu_ops(1)->draft_attention(b.args(context, before));
  for (Floats* changed : {&b.k, &b.v}) {
    const float kept = std::exchange((*changed)[7 * 4], 3.0F);
    make_cpu_ops(1)->draft_attention(b.args(context, after));
    (*changed)[7 * 4] = kept;
    for (int64_t r = 0; r < b.rows(); ++r)
      CHECK(same_bits(std::span(before).subspan(at(r * 8), 8), std::span(after).subspan(at(r * 8), 8)) == (r >= 8));
  }
}

TEST_CASE("top_logits: order, ties, ids, too few, NaN") {
  Random random(17);
  const auto ops = make_cpu_ops(2);
  const int64_t rows = 5, n = 300, k = 16;
  Floats x = random.normals(rows * n);
  for (float& v : x) v = std::round(v * 4) / 4;  // many ties
  x[7] = NAN;
  x[n + 3] = INFINITY;
  Floats value(at(rows * k), NAN);
  Ints index(at(rows * k), 77), order(at(n));
  ops->top_logits({.logits = tensor(x, {rows, n}),
                   .id = {},
                   .first = 1000,
                   .value = tensor(value, {rows, k}),
                   .index = tensor(index, {rows, k})});
  for (int64_t r = 0; r < rows; ++r) {
    std::iota(order.begin(), order.end(), 0);
    std::erase_if(order, [&](int32_t i) { return std::isnan(x[at(r * n + i)]); });
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return x[at(r * n + a)] > x[at(r * n + b)]; });
    for (int64_t j = 0; j < k; ++j) {
      CHECK(index[at(r * k + j)] == 1000 + order[at(j)]);
      CHECK(value[at(r * k + j)] == x[at(r * n + order[at(j)])]);
    }
    order.resize(at(n));
  }
  Floats few = {2, -INFINITY, 2, 1, NAN};
  Ints id = {9, 1, 4, 5, 6}, chosen(4, 77);
  Floats best(4, NAN);
  ops->top_logits({.logits = tensor(few, {1, 5}),
                   .id = tensor(id, {1, 5}),
                   .value = tensor(best, {1, 4}),
                   .index = tensor(chosen, {1, 4})});
  CHECK(chosen == Ints{4, 9, 5, -1});
  CHECK(best == Floats{2, 2, 1, -INFINITY});
}

TEST_CASE("selector_walk: scores, predecessor of the walk, ties, missing candidates") {
  Random random(18);
  const auto ops = make_cpu_ops(2);
  const int64_t blocks = 3, steps = 7, k = 5, rank = 11, vocab = 40, rows = blocks * steps;
  for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
    TestWeight a(format, vocab, rank, random), b(format, vocab, rank, random);
    Floats unary = random.normals(rows * k), hidden = random.normals(rows * rank, 5.0F);
    Ints candidate(at(rows * k)), anchor = {3, 0, 39};
    for (int32_t& c : candidate) c = random.between(0, static_cast<int>(vocab) - 1);
    candidate[at(k)] = -1;
    Floats score(unary.size(), NAN);
    Ints token(at(rows), 77);
    SelectorWalkArgs args{.unary = tensor(unary, {rows, k}),
                          .candidate = tensor(candidate, {rows, k}),
                          .hidden = tensor(hidden, {rows, rank}),
                          .predecessor = &a.w,
                          .successor = &b.w,
                          .anchor = tensor(anchor, {blocks}),
                          .token = tensor(token, {rows}),
                          .score = tensor(score, {rows, k})};
    ops->selector_walk(args);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t previous = r % steps == 0 ? anchor[at(r / steps)] : token[at(r - 1)];
      for (int64_t c = 0; c < k; ++c) {
        const int32_t id = candidate[at(r * k + c)];
        if (id < 0) {
          CHECK(score[at(r * k + c)] == -INFINITY);
          continue;
        }
        double want = d(unary[at(r * k + c)]);
        for (int64_t i = 0; i < rank; ++i)
          want += a.dense[at(previous * rank + i)] * d(hidden[at(r * rank + i)]) * b.dense[at(id * rank + i)];
        CHECK(std::fabs(d(score[at(r * k + c)]) - want) < 1e-5);
      }
      const auto top = std::max_element(score.begin() + r * k, score.begin() + (r + 1) * k) - score.begin();
      CHECK(token[at(r)] == candidate[at(top)]);  // max_element gives the first of equals
    }
  }
}

TEST_CASE("selector_walk: without a successor table it takes the best of every row; an empty row ends the walk") {
  const auto ops = make_cpu_ops(1);
  Random random(19);
  TestWeight a(WeightFormat::f32, 10, 4, random);
  Floats zero(40, 0.0F), unary = {1, 1, 0, 3, 2, 1, 5, 4, 3}, hidden = random.normals(12), score(9, NAN);
  const Weight none = plain(zero, 10, 4);
  Ints candidate = {7, 8, 9, 1, 2, 3, 4, 5, 6}, anchor = {0}, token(3, 77);
  SelectorWalkArgs args{.unary = tensor(unary, {3, 3}),
                        .candidate = tensor(candidate, {3, 3}),
                        .hidden = tensor(hidden, {3, 4}),
                        .predecessor = &a.w,
                        .successor = &none,
                        .anchor = tensor(anchor, {1}),
                        .token = tensor(token, {3}),
                        .score = tensor(score, {3, 3})};
  ops->selector_walk(args);
  CHECK(token == Ints{7, 1, 4});
  CHECK(score == unary);
  candidate[3] = candidate[4] = candidate[5] = -1;
  ops->selector_walk(args);
  CHECK(token == Ints{7, -1, -1});
}

}  // namespace
}  // namespace glm53::test
