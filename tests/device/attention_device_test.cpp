// Latent attention on a GPU against the CPU reference: cache formats, contexts, window rows as if alone.
#include "tests/device/device.h"

namespace glm53::test {
namespace {

struct Sizes {
  int heads, nope, v, latent, kpool, top;
};

/// A cache of `tokens` latents on the host, and the same on the device.
struct Context {
  Context(Device& device, const Sizes& sizes, KvFormat format, int tokens, Random& random)
      : s(sizes), world(geometry(sizes, format), 1, 0, tokens / kBlockTokens + 2) {
    for (int b = 0; b <= tokens / kBlockTokens; ++b) table.push_back(b + 1);
    std::reverse(table.begin(), table.end());  // blocks in no order
    Floats latents = random.normals(int64_t{tokens} * s.latent);
    Step step({}, {{.slot = 0, .position = 0, .rows = tokens, .table = table}});
    make_cpu_ops(1)->latent_write({&step.batch, 1, &world.caches, tensor(latents, {tokens, s.latent})});
    on_device = world.caches;
    on_device.blocks = device.put(world.caches.blocks);
  }
  static CacheGeometry geometry(const Sizes& s, KvFormat format) {
    CacheGeometry g;
    g.mla_layers = 2;
    g.kpool = s.kpool;
    g.latent = s.latent;
    g.index_dim = 128;
    g.format = format;
    return g;
  }
  Sizes s;
  World world;
  Ints table;
  Caches on_device;
};

struct Query {
  Floats q;
  Ints selected, count;
};

/// `rows` queries from `position` on with random selections.
Query ask(const Sizes& s, int position, int rows, Random& random) {
  Query out{random.normals(int64_t{rows} * s.heads * s.latent), {}, {}};
  for (int r = 0; r < rows; ++r) {
    Ints pools;
    for (int p = 0; p < (position + r + 1) / s.kpool; ++p) pools.push_back(p);
    while (static_cast<int>(pools.size()) > s.top) {
      pools.erase(pools.begin() + random.between(0, static_cast<int>(pools.size()) - 1));
    }
    out.count.push_back(static_cast<int32_t>(pools.size()));
    pools.resize(at(s.top), -1);
    out.selected.insert(out.selected.end(), pools.begin(), pools.end());
  }
  return out;
}

Floats on_device(Device& device, const Context& context, const Query& query, const Tensor& q, int first, Step& step) {
  const int64_t rows = step.rows;
  const auto part = [&](const Ints& v, int64_t width) {
    return Ints(v.begin() + first * width, v.begin() + (first + rows) * width);
  };
  const Sizes& s = context.s;
  const Tensor out = device.poisoned(Dtype::f32, {rows, q.dim(1)});
  device.ops().mla_sparse({&step.batch, 1, &context.on_device, q.rows(first, first + rows),
                           device.ints(part(query.selected, s.top), {rows, s.top}),
                           device.ints(part(query.count, 1), {rows}), s.heads, 0.1F, out});
  return device.fetch(out);
}

void check(const Sizes& s, KvFormat format, int tokens, int rows, Random& random) {
  Device device;
  Context context(device, s, format, tokens, random);
  const int position = tokens - rows;
  Query query = ask(s, position, rows, random);
  const int64_t width = int64_t{s.heads} * s.latent;
  const Tensor q = device.halves(query.q, {rows, width});
  Floats want(at(rows * width), NAN);
  Step host({{.slot = 0, .position = position, .rows = rows, .table = context.table}}, {});
  make_cpu_ops(1)->mla_sparse({&host.batch, 1, &context.world.caches, tensor(query.q, {rows, width}),
                               tensor(query.selected, {rows, s.top}), tensor(query.count, {rows}), s.heads, 0.1F,
                               tensor(want, {rows, width})});
  CAPTURE(tokens);
  CAPTURE(rows);
  CAPTURE(s.latent);
  for (const bool window : {true, false}) {
    const auto step_of = [&](int first, int n) {
      const Seq seq{.slot = 0, .position = position + first, .rows = n, .table = context.table};
      return window ? std::make_unique<Step>(std::vector<Seq>{seq}, std::vector<Seq>{})
                    : std::make_unique<Step>(std::vector<Seq>{}, std::vector<Seq>{seq});
    };
    const Floats got = on_device(device, context, query, q, 0, *step_of(0, rows));
    CHECK(distance(got, want) < 5e-3);
    for (const int r : {0, rows / 2, rows - 1}) {
      const Floats alone = on_device(device, context, query, q, r, *step_of(r, 1));
      CHECK(same_bits(alone, std::span(got).subspan(at(r * width), at(width))));
    }
  }
}

TEST_CASE("mla_sparse: formats, short and long contexts, rows as if alone") {
  Random random(1);
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_c528, KvFormat::int8_c528}) {
    check({4, 16, 16, 128, 4, 16}, format, 90, 6, random);
    check({33, 16, 16, 512, 4, 512}, format, 2300, 3, random);
  }
  check({2, 16, 16, 64, 4, 8}, KvFormat::bf16, 1, 1, random);
  check({32, 16, 16, 512, 4, 512}, KvFormat::fp8_c528, 700, 16, random);
}

TEST_CASE("absorb and expand: against the CPU, rows as if alone") {
  Random random(2);
  Device device;
  for (const Sizes& s : {Sizes{3, 16, 32, 128, 4, 8}, {5, 64, 48, 512, 4, 8}, {2, 256, 256, 512, 4, 8}}) {
    const TestWeight weight(WeightFormat::bf16, int64_t{s.heads} * (s.nope + s.v), s.latent, random);
    const Weight w = device.put(weight.w);
    for (const int64_t rows : {1, 2, 16, 17, 65, 130}) {
      CAPTURE(rows);
      const int64_t wide = int64_t{s.heads} * s.latent;
      for (const bool absorb : {true, false}) {
        const int64_t in = absorb ? int64_t{s.heads} * s.nope : wide, out = absorb ? wide : int64_t{s.heads} * s.v;
        Floats x = random.normals(rows * in), want(at(rows * out), NAN);
        const Tensor xs = device.halves(x, {rows, in});
        const auto run = [&](Ops& ops, const Tensor& from, const Weight& kv_b, const Tensor& to) {
          absorb ? ops.mla_absorb({from, &kv_b, s.heads, s.nope, s.v, to})
                 : ops.mla_expand({from, &kv_b, s.heads, s.nope, s.v, to});
        };
        run(*make_cpu_ops(1), tensor(x, {rows, in}), weight.w, tensor(want, {rows, out}));
        const Tensor to = device.poisoned(Dtype::f32, {rows, out});
        run(device.ops(), xs, w, to);
        const Floats got = device.fetch(to);
        CHECK(distance(got, want) < 1e-5);
        const Tensor alone = device.poisoned(Dtype::f32, {1, out});
        run(device.ops(), xs.rows(rows - 1, rows), w, alone);
        CHECK(same_bits(device.fetch(alone), std::span(got).subspan(at((rows - 1) * out))));
      }
    }
  }
}

}  // namespace
}  // namespace glm53::test
