#include "cache_world.h"
#include "kernels/cpu/latent_cache.h"
#include "kernels/half.h"

using namespace glm53;
using namespace glm53::test;

namespace {

struct Sizes {
  int heads, nope, v, latent, kpool;
};

struct Mla {
  Mla(Random& random, const Sizes& sizes, int tokens) : s(sizes), T(tokens) {
    latent = random.normals(int64_t{T} * s.latent);
    q = random.normals(int64_t{T} * s.heads * s.nope, 2.0F);
    kv_b = random.normals(int64_t{s.heads} * (s.nope + s.v) * s.latent, 1.0F / std::sqrt(float(s.latent)));
    kv_b_w = plain(kv_b, int64_t{s.heads} * (s.nope + s.v), s.latent);
  }

  // Expanded attention (spec model §5) of one row over `tokens`, from latents as the cache gives them back.
  Doubles expanded(int row, const Ints& tokens, const Floats& cached) const {
    Doubles out;
    for (int h = 0; h < s.heads; ++h) {
      const auto project = [&](int first, int n, int t) {
        Doubles y(at(n), 0.0);
        for (int i = 0; i < n; ++i) {
          const float* w = kv_b.data() + (int64_t{h} * (s.nope + s.v) + first + i) * s.latent;
          for (int j = 0; j < s.latent; ++j) y[at(i)] += double(w[j]) * double(cached[at(int64_t{t} * s.latent + j)]);
        }
        return y;
      };
      Doubles weight;
      double total = 0, largest = -1e300;
      for (const int t : tokens) {
        const Doubles k = project(0, s.nope, t);
        double dot = 0;
        for (size_t i = 0; i < k.size(); ++i) dot += k[i] * double(q[(at(row) * at(s.heads) + at(h)) * at(s.nope) + i]);
        weight.push_back(dot * double(scale()));
        largest = std::max(largest, weight.back());
      }
      for (double& w : weight) total += w = std::exp(w - largest);
      Doubles o(at(s.v), 0.0);
      for (size_t j = 0; j < tokens.size(); ++j) {
        const Doubles v = project(s.nope, s.v, tokens[j]);
        for (size_t i = 0; i < o.size(); ++i) o[i] += weight[j] / total * v[i];
      }
      out.insert(out.end(), o.begin(), o.end());
    }
    return out;
  }
  float scale() const { return 1.0F / std::sqrt(float(s.nope)); }

  Sizes s;
  int T;
  Floats latent, q, kv_b;
  Weight kv_b_w;
};

World make_world(const Sizes& s, KvFormat format, int blocks) {
  CacheGeometry g;
  g.mla_layers = 2;
  g.kpool = s.kpool;
  g.latent = s.latent;
  g.index_dim = 128;
  g.format = format;
  return World(g, 2, 0, blocks);
}

void write_latents(Ops& ops, World& world, Mla& m, const Ints& table) {
  Step step({}, {{.slot = 0, .position = 0, .rows = m.T, .table = table}});
  ops.latent_write({&step.batch, 1, &world.caches, tensor(m.latent, {m.T, m.s.latent})});
}

Floats read_latents(World& world, const Mla& m, const Ints& table) {
  const cpu::LatentCache cache(world.caches, 1, "test");
  Floats all(m.latent.size());
  for (int t = 0; t < m.T; ++t) {
    cache.read_latent(static_cast<BlockId>(table[at(t / 64)]), t % 64, all.data() + int64_t{t} * m.s.latent);
  }
  return all;
}

// Absorb, attend, expand for the rows of a step; row r of the step takes query from + r.
Floats attend(Ops& ops, World& world, Mla& m, Step& step, int from, Ints& selected, Ints& count) {
  const int64_t R = step.rows, H = m.s.heads, top = static_cast<int64_t>(selected.size()) / R;
  Floats q(at(R * H * m.s.nope), 0.0F), absorbed(at(R * H * m.s.latent), NAN), a(at(R * H * m.s.latent), NAN);
  Floats out(at(R * H * m.s.v), NAN);
  std::copy_n(m.q.begin() + from * H * m.s.nope, step.batch.rows * H * m.s.nope, q.begin());
  ops.mla_absorb(
      {tensor(q, {R, H * m.s.nope}), &m.kv_b_w, m.s.heads, m.s.nope, m.s.v, tensor(absorbed, {R, H * m.s.latent})});
  ops.mla_sparse({&step.batch, 1, &world.caches, tensor(absorbed, {R, H * m.s.latent}), tensor(selected, {R, top}),
                  tensor(count, {R}), m.s.heads, m.scale(), tensor(a, {R, H * m.s.latent})});
  ops.mla_expand({tensor(a, {R, H * m.s.latent}), &m.kv_b_w, m.s.heads, m.s.nope, m.s.v, tensor(out, {R, H * m.s.v})});
  return out;
}

// A random selection of at most `top` complete pools for each position of the prompt.
void choose(Random& random, int T, int kpool, int top, Ints& selected, Ints& count) {
  for (int t = 0; t < T; ++t) {
    Ints pools;
    for (int p = 0; p < (t + 1) / kpool; ++p) pools.push_back(p);
    while (static_cast<int>(pools.size()) > top) {
      pools.erase(pools.begin() + random.between(0, static_cast<int>(pools.size()) - 1));
    }
    count.push_back(static_cast<int32_t>(pools.size()));
    pools.resize(at(top), -1);
    selected.insert(selected.end(), pools.begin(), pools.end());
  }
}

Ints attended(int t, int kpool, std::span<const int32_t> pools) {
  Ints tokens;
  for (const int32_t p : pools) {
    for (int i = 0; i < kpool; ++i) tokens.push_back(p * kpool + i);
  }
  for (int i = t + 1 - (t + 1) % kpool; i <= t; ++i) tokens.push_back(i);
  return tokens;
}

constexpr KvFormat kFormats[] = {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_c528, KvFormat::int8_c528};

}  // namespace

TEST_CASE("absorbed attention over selected pools equals expanded attention") {
  const auto ops = make_cpu_ops(2);
  Random random(81);
  for (const Sizes& s : {Sizes{3, 24, 20, 128, 4}, Sizes{2, 16, 40, 256, 16}, Sizes{12, 8, 8, 128, 4}}) {
    for (const KvFormat format : kFormats) {
      const int T = 150, top = s.kpool == 4 ? 20 : 5;
      Mla m(random, s, T);
      World world = make_world(s, format, 4);
      world.reset(*ops);
      const Ints table{3, 1, 2};  // 3 is the last block of the pool
      write_latents(*ops, world, m, table);
      const Floats cached = read_latents(world, m, table);
      Ints selected, count;
      choose(random, T, s.kpool, top, selected, count);
      for (int i = 0; i < 2 * top; ++i) selected.push_back(1 << 30);  // padding rows
      count.resize(at(T + 2), 1 << 30);
      Step step({}, {{.slot = 0, .position = 0, .rows = T, .table = table}}, 2, 1);
      const Floats got = attend(*ops, world, m, step, 0, selected, count);
      const int64_t width = int64_t{s.heads} * s.v;
      for (int t = 0; t < T; t += t < 40 ? 1 : 7) {
        const auto pools = std::span<const int32_t>(selected).subspan(at(t * top), at(count[at(t)]));
        const Doubles want = m.expanded(t, attended(t, s.kpool, pools), cached);
        CHECK(relative_error(std::span<const float>(got).subspan(at(t * width), at(width)), want) < 5e-6);
      }
      CHECK(all_zero(std::span<const float>(got).subspan(at(T * width))));
    }
  }
}

TEST_CASE("mla rows give the same bits alone, in a window, in any batch and on any number of threads") {
  const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
  Random random(82);
  const Sizes s{20, 16, 24, 128, 4};
  const int T = 100, top = 12;
  Mla m(random, s, T);
  World world = make_world(s, KvFormat::int8_c528, 3);
  world.reset(*one);
  const Ints table{2, 1};
  write_latents(*one, world, m, table);
  Ints selected, count;
  choose(random, T, 4, top, selected, count);
  Step whole({}, {{.slot = 0, .position = 0, .rows = T, .table = table}});
  const Floats all = attend(*one, world, m, whole, 0, selected, count);
  const int64_t width = int64_t{s.heads} * s.v;
  for (const int rows : {1, 2, 7, 16}) {
    const int from = T - rows;
    Ints some(selected.begin() + from * top, selected.end()), n(count.begin() + from, count.end());
    Step window({{.slot = 0, .position = from, .rows = rows, .table = table}}, {});
    const auto want = std::span<const float>(all).subspan(at(from * width));
    CHECK(same_bits(attend(*one, world, m, window, from, some, n), want));
    CHECK(same_bits(attend(*three, world, m, window, from, some, n), want));
  }
  CHECK(same_bits(attend(*three, world, m, whole, 0, selected, count), all));
}

TEST_CASE("mla_absorb and mla_expand take bf16 weights") {
  const auto ops = make_cpu_ops(2);
  Random random(84);
  const Sizes s{3, 20, 24, 72, 4};
  const int R = 5;
  Mla m(random, s, R);
  std::vector<uint16_t> codes;
  for (float& w : m.kv_b) {
    codes.push_back(f32_to_bf16(w));
    w = bf16_to_f32(codes.back());
  }
  Weight narrow = m.kv_b_w;
  narrow.format = WeightFormat::bf16;
  narrow.codes = Tensor::of(codes.data(), Dtype::bf16, {narrow.out, narrow.in});
  Floats results[2];
  for (const bool is_narrow : {false, true}) {
    const Weight& w = is_narrow ? narrow : m.kv_b_w;
    Floats absorbed(at(R * s.heads * s.latent), NAN), out(at(R * s.heads * s.v), NAN);
    const Tensor middle = tensor(absorbed, {R, s.heads * s.latent});
    ops->mla_absorb({tensor(m.q, {R, s.heads * s.nope}), &w, s.heads, s.nope, s.v, middle});
    ops->mla_expand({middle, &w, s.heads, s.nope, s.v, tensor(out, {R, s.heads * s.v})});
    results[is_narrow] = out;
  }
  CHECK(same_bits(results[0], results[1]));
  CHECK(!all_zero(results[0]));
  narrow.format = WeightFormat::fp8_row;
  Floats out(at(R * s.heads * s.latent));
  CHECK_THROWS_AS(ops->mla_absorb({tensor(m.q, {R, s.heads * s.nope}), &narrow, s.heads, s.nope, s.v,
                                   tensor(out, {R, s.heads * s.latent})}),
                  Error);
}

TEST_CASE("mla_sparse survives large scores and refuses wrong selections") {
  const auto ops = make_cpu_ops(1);
  Random random(83);
  const Sizes s{2, 16, 16, 128, 4};
  Mla m(random, s, 70);
  for (float& x : m.q) x *= 300.0F;
  World world = make_world(s, KvFormat::f32, 3);
  world.reset(*ops);
  const Ints table{1, 2};
  write_latents(*ops, world, m, table);
  Step step({{.slot = 0, .position = 69, .rows = 1, .table = table}}, {});
  Ints selected{0, 1, 5, 9, 10, 11, 12, 13, 14, 16}, count{10};
  const Floats got = attend(*ops, world, m, step, 69, selected, count);
  CHECK(relative_error(got, m.expanded(69, attended(69, 4, selected), m.latent)) < 1e-4);
  const auto refused = [&](Ints pools, int n) {
    Ints c{n};
    CHECK_THROWS_AS(attend(*ops, world, m, step, 69, pools, c), Error);
  };
  refused({0, 17}, 2);  // the pool of the row itself is not complete
  refused({3, 3}, 2);
  refused({-1, 3}, 2);
  refused({3, 4}, 3);
  refused({3, 4}, -1);
}
