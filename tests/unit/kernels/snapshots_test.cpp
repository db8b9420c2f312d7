#include "kda_world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

CacheGeometry geometry() {
  CacheGeometry g = kda_geometry(2, 8, 3);
  g.mla_layers = 2;
  g.kpool = 4;
  g.latent = 16;
  g.index_dim = 8;
  return g;
}

void fill(Tensor& t, Random& random) {
  for (int64_t i = 0; i < t.elements(); ++i) t.as<float>()[i] = random.normal();
}

std::span<const float> item(const Tensor& t, int64_t id) {
  const int64_t n = t.elements() / t.dim(0);
  return {t.as<const float>() + id * n, at(n)};
}

}  // namespace

TEST_CASE("a snapshot brings back state, history and ring, and nothing else") {
  const auto ops = make_cpu_ops(1);
  Random random(61);
  World world(geometry(), 3, 2, 2);
  Caches& c = world.caches;
  for (Tensor* t : {&c.state, &c.conv, &c.records, &c.ring}) fill(*t, random);
  const auto copy = [](std::span<const float> s) { return Floats(s.begin(), s.end()); };
  const Floats state = copy(item(c.state, 1)), ring = copy(item(c.ring, 1)), records = copy(item(c.records, 2));
  std::vector<Floats> history;
  for (int layer = 0; layer < 3; ++layer) history.push_back(copy(world.history(1, layer)));

  ops->snapshot_save(c, SlotId{1}, SnapId{1});
  CHECK(std::isnan(item(c.snap_state, 0)[0]));
  for (int layer = 0; layer < 3; ++layer) CHECK(same_bits(world.saved_history(1, layer), history[at(layer)]));
  ops->slot_reset(c, SlotId{1});
  CHECK(all_zero(item(c.state, 1)));
  CHECK(all_zero(item(c.conv, 1)));
  CHECK(all_zero(item(c.ring, 1)));
  const Floats neighbour = copy(item(c.state, 0));
  ops->snapshot_restore(c, SnapId{1}, SlotId{2});
  CHECK(same_bits(item(c.state, 2), state));
  CHECK(same_bits(item(c.ring, 2), ring));
  for (int layer = 0; layer < 3; ++layer) CHECK(same_bits(world.history(2, layer), history[at(layer)]));
  CHECK(same_bits(item(c.state, 0), neighbour));
  CHECK(same_bits(item(c.records, 2), records));

  CHECK_THROWS_AS(ops->snapshot_save(c, SlotId{3}, SnapId{0}), Error);
  CHECK_THROWS_AS(ops->snapshot_save(c, SlotId{0}, SnapId{2}), Error);
  CHECK_THROWS_AS(ops->snapshot_restore(c, SnapId::none, SlotId{0}), Error);
  CHECK_THROWS_AS(ops->slot_reset(c, SlotId::none), Error);
}

TEST_CASE("block_copy copies one whole block") {
  const auto ops = make_cpu_ops(1);
  Random random(62);
  World world(geometry(), 1, 0, 4);
  for (const int b : {1, 2, 3}) {
    for (float& x : world.block_floats(b)) x = random.normal();
  }
  const Floats two(world.block_floats(2).begin(), world.block_floats(2).end());
  ops->block_copy(world.caches, BlockId{1}, BlockId{3});
  CHECK(same_bits(world.block_floats(3), world.block_floats(1)));
  CHECK(same_bits(world.block_floats(2), two));
  CHECK_THROWS_AS(ops->block_copy(world.caches, BlockId{1}, BlockId{4}), Error);
  CHECK_THROWS_AS(ops->block_copy(world.caches, BlockId{1}, BlockId::null), Error);
}

TEST_CASE("caches of a model with one kind of layer") {
  const auto ops = make_cpu_ops(1);
  CacheGeometry g = geometry();
  g.mla_layers = 0;
  World kda_only(g, 2, 1, 0);
  kda_only.reset(*ops);
  ops->snapshot_save(kda_only.caches, SlotId{0}, SnapId{0});
  CHECK(all_zero(item(kda_only.caches.snap_state, 0)));
  g = geometry();
  g.kda_layers = 0;
  World mla_only(g, 2, 1, 2);
  mla_only.reset(*ops);
  ops->snapshot_save(mla_only.caches, SlotId{1}, SnapId{0});
  CHECK(all_zero(item(mla_only.caches.snap_ring, 0)));
  CHECK_THROWS_AS(ops->snapshot_save(mla_only.caches, SlotId{2}, SnapId{0}), Error);
}
