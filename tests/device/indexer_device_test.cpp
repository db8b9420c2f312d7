// Choice of pools on a GPU: scores against the CPU's, and the choice exactly the best of the device's own scores.
#include <numeric>

#include "tests/device/device.h"

namespace glm53::test {
namespace {

struct Index {
  Index(Device& device, KvFormat format, int dim, int tokens, Random& random)
      : world(geometry(format, dim), 1, 0, tokens / kBlockTokens + 2) {
    for (int b = 0; b <= tokens / kBlockTokens; ++b) table.push_back(b + 1);
    std::reverse(table.begin(), table.end());
    const auto cpu = make_cpu_ops(1);
    world.reset(*cpu);
    Floats key = random.normals(int64_t{tokens} * dim), gate = random.normals(int64_t{tokens} * dim);
    Floats norm = random.normals(dim, 0.1F, 1.0F), bias = random.normals(dim, 0.1F), ape = random.normals(4 * dim);
    const Weight n = plain(norm, dim, 1), b = plain(bias, dim, 1), a = plain(ape, 4, dim);
    Step step({}, {{.slot = 0, .position = 0, .rows = tokens, .table = table}});
    cpu->index_write(
        {&step.batch, 1, &world.caches, tensor(key, {tokens, dim}), tensor(gate, {tokens, dim}), &n, &b, &a});
    on_device = world.caches;
    on_device.blocks = device.put(world.caches.blocks);
  }
  static CacheGeometry geometry(KvFormat format, int dim) {
    CacheGeometry g;
    g.mla_layers = 2;
    g.kpool = 4;
    g.latent = 128;
    g.index_dim = dim;
    g.format = format;
    return g;
  }
  World world;
  Ints table;
  Caches on_device;
};

/// The `top` best of n scores, ties to the lower pool, in ascending order.
Ints best(std::span<const float> scores, int n, int top) {
  Ints pools(at(n));
  std::iota(pools.begin(), pools.end(), 0);
  std::stable_sort(pools.begin(), pools.end(), [&](int a, int b) { return scores[at(a)] > scores[at(b)]; });
  pools.resize(at(std::min(n, top)));
  std::sort(pools.begin(), pools.end());
  pools.resize(at(top), -1);
  return pools;
}

void check(KvFormat format, int dim, int heads, int tokens, int rows, int top, bool ties, Random& random) {
  Device device;
  const Index index(device, format, dim, tokens, random);
  CAPTURE(static_cast<int>(format));
  CAPTURE(dim);
  CAPTURE(tokens);
  const int position = tokens - rows, width = heads * dim, pools = tokens / kBlockTokens * 16 + 16;
  Floats q = random.normals(int64_t{rows} * width), weight = random.normals(int64_t{rows} * heads);
  if (ties) std::fill(weight.begin(), weight.end(), 0.0F);
  const Tensor query = device.halves(q, {rows, width});
  const Seq seq{.slot = 0, .position = position, .rows = rows, .table = index.table};
  Step step({seq}, {});
  const auto run = [&](Ops& ops, const Caches& caches, const Tensor& from, const Tensor& weights,
                       const Tensor& selected, const Tensor& count, const Tensor& scores) {
    ops.index_select({&step.batch, 1, &caches, from, weights, heads, top, selected, count, scores});
  };
  Floats want(at(int64_t{rows} * pools), NAN);
  Ints chosen(at(rows * top), 77), counts(at(rows), 77);
  run(*make_cpu_ops(1), index.world.caches, tensor(q, {rows, width}), tensor(weight, {rows, heads}),
      tensor(chosen, {rows, top}), tensor(counts, {rows}), tensor(want, {rows, pools}));
  const Tensor selected = device.ints(Ints(at(rows * top), 77), {rows, top}),
               count = device.ints(Ints(at(rows), 77), {rows});
  const Tensor scores = device.poisoned(Dtype::f32, {rows, pools});
  run(device.ops(), index.on_device, query, device.floats(weight, {rows, heads}), selected, count, scores);
  const Floats got = device.fetch(scores);
  Ints picked(at(rows * top)), found(at(rows));
  device.ops().copy(tensor(picked, {rows, top}), selected);
  device.ops().copy(tensor(found, {rows}), count);
  device.ops().synchronize();
  for (int r = 0; r < rows; ++r) {
    const int n = (position + r + 1) / 4;
    CHECK(found[at(r)] == std::min(n, top));
    const auto mine = std::span(got).subspan(at(int64_t{r} * pools), at(n));
    const auto theirs = std::span(want).subspan(at(int64_t{r} * pools), at(n));
    CHECK(relative_error(mine, widen(theirs)) < 5e-3);
    CHECK(best(mine, n, top) == Ints(picked.begin() + r * top, picked.begin() + (r + 1) * top));
  }
}

TEST_CASE("index_select: formats, contexts around the limits, ties") {
  Random random(1);
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_c528, KvFormat::int8_c528}) {
    check(format, 128, 32, 700, 5, 32, false, random);
    check(format, 128, 3, 515, 2, 64, true, random);
  }
  check(KvFormat::bf16, 64, 4, 300, 3, 16, false, random);
  for (const int tokens : {3, 4, 130, 131, 132, 2049}) check(KvFormat::fp8_c528, 128, 32, tokens, 1, 32, false, random);
}

TEST_CASE("index_select: a long context is shared among blocks, with many ties too") {
  Random random(2);
  check(KvFormat::fp8_c528, 128, 32, 70000, 2, 512, false, random);
  check(KvFormat::fp8_c528, 128, 32, 40000, 3, 512, true, random);
  check(KvFormat::bf16, 64, 1, 50000, 9, 1000, false, random);  // one head: half of the scores are zero
  check(KvFormat::int8_c528, 128, 2, 36000, 1, 7000, false, random);
  check(KvFormat::bf16, 64, 1, 50000, 2, 1024, false, random);
}

}  // namespace
}  // namespace glm53::test
