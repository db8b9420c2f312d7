#include <numeric>

#include "cache_world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// One sequence's indexer inputs and weights, and the maths of spec model §5.2 in fp64.
struct Indexer {
  Indexer(Random& random, int tokens, int pool_tokens, int index_dim, int head_count)
      : T(tokens), kpool(pool_tokens), dim(index_dim), heads(head_count) {
    key = random.normals(int64_t{T} * dim, 2.0F, 0.5F);
    gate = random.normals(int64_t{T} * dim, 1.5F);
    norm = random.normals(dim, 0.1F, 1.0F);
    bias = random.normals(dim, 0.1F);
    ape = random.normals(int64_t{kpool} * dim);
    query = random.normals(int64_t{T} * heads * dim);
    head_weight = random.normals(int64_t{T} * heads);  // of both signs
    norm_w = plain(norm, dim, 1);
    bias_w = plain(bias, dim, 1);
    ape_w = plain(ape, kpool, dim);
  }

  Doubles normed(int t) const {
    const float* x = key.data() + int64_t{t} * dim;
    const double mean = std::accumulate(x, x + dim, 0.0) / dim;
    double variance = 0;
    for (int i = 0; i < dim; ++i) variance += std::pow(double(x[i]) - mean, 2) / dim;
    Doubles y(at(dim));
    for (size_t i = 0; i < y.size(); ++i) {
      y[i] = (double(x[i]) - mean) / std::sqrt(variance + 1e-6) * double(norm[i]) + double(bias[i]);
    }
    return y;
  }
  Doubles pooled(int pool) const {
    std::vector<Doubles> keys;
    for (int s = 0; s < kpool; ++s) keys.push_back(normed(pool * kpool + s));
    Doubles y(at(dim));
    for (size_t c = 0; c < y.size(); ++c) {
      double total = 0;
      for (size_t s = 0; s < at(kpool); ++s) {
        const size_t row = at(pool) * at(kpool) + s;
        const double w = std::exp(double(gate[row * at(dim) + c]) + double(ape[s * at(dim) + c]));
        total += w;
        y[c] += w * keys[s][c];
      }
      y[c] /= total;
    }
    return y;
  }
  double score(int t, const Doubles& pool_key) const {
    double total = 0;
    for (size_t h = 0; h < at(heads); ++h) {
      double dot = 0;
      for (size_t i = 0; i < at(dim); ++i) dot += double(query[(at(t) * at(heads) + h) * at(dim) + i]) * pool_key[i];
      total += double(head_weight[at(t) * at(heads) + h]) / std::sqrt(double(heads)) *
               std::max(0.0, dot / std::sqrt(double(dim)));
    }
    return total;
  }

  int T, kpool, dim, heads;
  Floats key, gate, norm, bias, ape, query, head_weight;
  Weight norm_w, bias_w, ape_w;
};

CacheGeometry geometry(int kpool, int dim, KvFormat format = KvFormat::f32) {
  CacheGeometry g;
  g.mla_layers = 2;
  g.kpool = kpool;
  g.latent = 128;
  g.index_dim = dim;
  g.format = format;
  return g;
}

Floats slice(const Floats& all, int64_t from, int64_t rows, int64_t width, int64_t padded) {
  Floats v(at(padded * width), NAN);
  std::copy_n(all.begin() + from * width, rows * width, v.begin());
  return v;
}

void write(Ops& ops, World& world, Indexer& in, Step& step, int from) {
  Floats key = slice(in.key, from, step.batch.rows, in.dim, step.rows);
  Floats gate = slice(in.gate, from, step.batch.rows, in.dim, step.rows);
  ops.index_write({&step.batch, 1, &world.caches, tensor(key, {step.rows, in.dim}), tensor(gate, {step.rows, in.dim}),
                   &in.norm_w, &in.bias_w, &in.ape_w});
}

struct Selected {
  Ints pools, count;
  Floats scores;
  std::span<const int32_t> row(int64_t r, int top) const {
    return std::span(pools).subspan(at(r * top), at(count[at(r)]));
  }
};

Selected select(Ops& ops, World& world, Indexer& in, Step& step, int from, int top, int shown_pools) {
  Floats query = slice(in.query, from, step.batch.rows, int64_t{in.heads} * in.dim, step.rows);
  Floats weight = slice(in.head_weight, from, step.batch.rows, in.heads, step.rows);
  const int64_t R = step.rows;
  Selected s{Ints(at(R * top), 12345), Ints(at(R), 12345), Floats(at(R * shown_pools), NAN)};
  ops.index_select({&step.batch, 1, &world.caches, tensor(query, {R, in.heads * in.dim}), tensor(weight, {R, in.heads}),
                    in.heads, top, tensor(s.pools, {R, top}), tensor(s.count, {R}),
                    shown_pools > 0 ? tensor(s.scores, {R, shown_pools}) : Tensor{}});
  return s;
}

Ints brute_force(std::span<const float> scores, int candidates, int top) {
  Ints order(at(candidates));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[at(a)] > scores[at(b)]; });
  order.resize(at(std::min(candidates, top)));
  std::sort(order.begin(), order.end());
  return order;
}

bool equal(std::span<const int32_t> a, const Ints& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

TEST_CASE("index_write pools keys as the spec does, in pieces of any size") {
  const auto ops = make_cpu_ops(2);
  Random random(71);
  for (const int kpool : {4, 16}) {
    Indexer in(random, 150, kpool, 24, 2);
    for (int round = 0; round < 4; ++round) {
      World world(geometry(kpool, 24), 1, 2, 5);
      world.reset(*ops);
      const int exported = random.between(1, 149);
      for (int from = 0; from < in.T;) {
        const int rows = std::min(round == 0 ? in.T : random.between(1, 60), in.T - from);
        Seq seq{.slot = 0, .position = from, .rows = rows, .table = {4, 1, 3}};
        if (from <= exported && exported <= from + rows) seq.export_pos = {-1, exported}, seq.export_snap = {-1, 1};
        Step step({}, {seq}, 1, 1);
        write(*ops, world, in, step, from);
        from += rows;
      }
      for (int t = in.T - world.caches.geometry.ring(); t < in.T; ++t) {
        const auto ring = world.ring(0, 1, t);
        CHECK(relative_error(ring.first(24), in.normed(t)) < 2e-6);
        CHECK(same_bits(ring.subspan(24), std::span<const float>(in.gate).subspan(at(t * 24), 24)));
      }
      const Ints table{4, 1, 3};
      for (int pool = 0; pool < in.T / kpool; ++pool) {
        const int block = table[at(pool * kpool / 64)];
        const auto* layer = static_cast<const std::byte*>(world.caches.blocks.data) +
                            at(block) * world.caches.layout.block_bytes + world.caches.layout.layer_bytes;
        const auto* keys = reinterpret_cast<const float*>(layer + world.caches.layout.pool_keys);
        CHECK(relative_error({keys + pool % (64 / kpool) * 24, 24}, in.pooled(pool)) < 2e-6);
      }
      // The exported ring still holds the tokens that complete the next pool.
      const int ring = world.caches.geometry.ring();
      for (int t = std::max(0, exported - kpool); t < exported; ++t) {
        const auto* saved = world.caches.snap_ring.as<const float>() + (int64_t{3} * ring + t % ring) * 48;
        CHECK(relative_error({saved, 24}, in.normed(t)) < 2e-6);
      }
      CHECK(std::isnan(world.caches.snap_ring.as<const float>()[0]));
    }
  }
}

TEST_CASE("index_select equals brute force at every length up to three times the budget") {
  const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
  Random random(72);
  for (const int kpool : {4, 16}) {
    for (const int heads : {3, 32}) {
      const int top = kpool == 4 ? 5 : 3, T = 3 * top * kpool + kpool, pools = T / kpool + 1;
      Indexer in(random, T, kpool, 24, heads);
      World world(geometry(kpool, 24), 1, 0, 4);
      world.reset(*one);
      Step step({}, {{.slot = 0, .position = 0, .rows = T, .table = {3, 1, 2}}}, 2, 1);
      write(*one, world, in, step, 0);
      const Selected s = select(*one, world, in, step, 0, top, pools);
      const Selected other = select(*three, world, in, step, 0, top, pools),
                     blind = select(*three, world, in, step, 0, top, 0);
      CHECK(same_bits(s.scores, other.scores));
      CHECK(s.pools == other.pools);
      CHECK(s.pools == blind.pools);
      CHECK(s.count == blind.count);
      std::vector<Doubles> keys;
      for (int pool = 0; pool < T / kpool; ++pool) keys.push_back(in.pooled(pool));
      bool own_pool_dropped = false;
      for (int t = 0; t < T; ++t) {
        const int candidates = (t + 1) / kpool;
        const auto scores = std::span<const float>(s.scores).subspan(at(t * pools), at(pools));
        Doubles want;
        for (int pool = 0; pool < candidates; ++pool) want.push_back(in.score(t, keys[at(pool)]));
        CHECK(relative_error(scores.first(at(candidates)), want) < 5e-6);
        for (int pool = candidates; pool < pools; ++pool) CHECK(scores[at(pool)] == kNone);
        CHECK(equal(s.row(t, top), brute_force(scores, candidates, top)));
        for (int i = s.count[at(t)]; i < top; ++i) CHECK(s.pools[at(t * top + i)] == -1);
        const auto row = s.row(t, top);
        if ((t + 1) % kpool == 0 && !std::binary_search(row.begin(), row.end(), t / kpool)) own_pool_dropped = true;
      }
      CHECK(own_pool_dropped);  // a complete pool of the query itself competes like any other
      for (int row = T; row < T + 2; ++row) {
        CHECK(s.count[at(row)] == 0);
        CHECK(s.pools[at(row * top)] == -1);
        CHECK(all_zero(std::span<const float>(s.scores).subspan(at(row * pools), at(pools))));
      }
      // A row alone gives what it gives among others.
      for (int t = T - 6; t < T; ++t) {
        Step single({{.slot = 0, .position = t, .rows = 1, .table = {3, 1, 2}}}, {});
        const Selected alone = select(*one, world, in, single, t, top, pools);
        CHECK(same_bits(alone.scores, std::span<const float>(s.scores).subspan(at(t * pools), at(pools))));
      }
    }
  }
}

TEST_CASE("index_select: ties and zeros of either sign go to the lower pool") {
  const auto ops = make_cpu_ops(2);
  Random random(73);
  const int T = 120, top = 7;
  Indexer in(random, T, 4, 24, 2);
  for (const bool negative : {false, true}) {
    std::fill(in.query.begin(), in.query.end(), 0.0F);
    for (float& w : in.head_weight) w = negative ? -1.0F : 1.0F;
    World world(geometry(4, 24), 1, 0, 4);
    world.reset(*ops);
    Step step({}, {{.slot = 0, .position = 0, .rows = T, .table = {1, 2}}});
    write(*ops, world, in, step, 0);
    const Selected s = select(*ops, world, in, step, 0, top, 0);
    const Ints lowest{0, 1, 2, 3, 4, 5, 6};
    for (int t = 28; t < T; ++t) CHECK(equal(s.row(t, top), lowest));
  }
  // Half of the pools are equal copies: the cut falls among equals.
  for (int t = 0; t < T; ++t) {
    std::copy_n(in.key.begin() + t % 8 * 24, 24, in.key.begin() + t * 24);
    std::copy_n(in.gate.begin() + t % 8 * 24, 24, in.gate.begin() + t * 24);
  }
  in.query = random.normals(int64_t{T} * 48);
  World world(geometry(4, 24), 1, 0, 4);
  world.reset(*ops);
  Step step({}, {{.slot = 0, .position = 0, .rows = T, .table = {1, 2}}});
  write(*ops, world, in, step, 0);
  const Selected s = select(*ops, world, in, step, 0, top, 30);
  for (int t = 0; t < T; ++t) {
    const auto scores = std::span<const float>(s.scores).subspan(at(t * 30), 30);
    CHECK(equal(s.row(t, top), brute_force(scores, (t + 1) / 4, top)));
  }
}

TEST_CASE("index_select in the stored formats") {
  const auto ops = make_cpu_ops(2);
  Random random(74);
  const int T = 64, pools = 16;
  const double bound[] = {5e-6, 1e-2, 8e-2, 4e-2};
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_c528, KvFormat::int8_c528}) {
    Indexer in(random, T, 4, 128, 8);
    World world(geometry(4, 128, format), 1, 0, 2);
    world.reset(*ops);
    Step step({}, {{.slot = 0, .position = 0, .rows = T, .table = {1}}});
    write(*ops, world, in, step, 0);
    const Selected s = select(*ops, world, in, step, 0, 3, pools);
    std::vector<Doubles> keys;
    for (int pool = 0; pool < pools; ++pool) keys.push_back(in.pooled(pool));
    Doubles want;
    Floats got;
    for (int t = 0; t < T; ++t) {
      for (int pool = 0; pool < (t + 1) / 4; ++pool) {
        want.push_back(in.score(t, keys[at(pool)]));
        got.push_back(s.scores[at(t * pools + pool)]);
      }
    }
    CHECK(relative_error(got, want) < bound[static_cast<size_t>(format)]);
  }
}
