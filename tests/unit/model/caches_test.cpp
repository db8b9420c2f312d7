// Sizes of the cache pools.
#include <doctest/doctest.h>

#include "engine/model/model.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

/// The real model on one of two ranks (spec runtime §1).
CacheGeometry real_rank() {
  CacheGeometry g;
  g.mla_layers = 11;
  g.kda_layers = 34;
  g.kpool = 4;
  g.latent = 512;
  g.index_dim = 128;
  g.kda_heads = 32;
  g.head_dim = 128;
  g.conv_channels = 12288;
  g.format = KvFormat::fp8_c528;
  return g;
}

TEST_CASE("units of the real model") {
  const PoolUnit unit = pool_unit(real_rank(), Dtype::bf16);
  CHECK(unit.block == 394944);
  const size_t state = size_t{34} * 32 * 128 * 128 * 4, ring = size_t{11} * 32 * 2 * 128 * 2;
  CHECK(unit.snap == state + size_t{34} * 3 * 12288 * 2 + ring);
  CHECK(unit.slot == state + size_t{34} * 19 * 12288 * 2 + size_t{34} * 16 * 32 * (3 * 128 + 1) * 4 + ring);
}

TEST_CASE("pools hold what their units say") {
  const auto ops = make_cpu_ops(1);
  CacheGeometry g = real_rank();
  g.kda_layers = 2;
  g.mla_layers = 3;
  g.kda_heads = 2;
  g.head_dim = 16;
  g.conv_channels = 96;
  const PoolUnit unit = pool_unit(g, ops->activation());
  const auto total = [](const OwnedCaches& c) {
    size_t bytes = 0;
    for (const Buffer& b : c.memory) bytes += b.bytes();
    return bytes;
  };
  const OwnedCaches all = make_caches(g, {5, 3, 2}, *ops);
  CHECK(total(all) == 5 * unit.block + 3 * unit.slot + 2 * unit.snap);
  CHECK(all.caches.blocks.dim(0) == 5);
  CHECK(all.caches.state.dim(0) == 3);
  CHECK(all.caches.snap_ring.dim(0) == 2);
  const OwnedCaches no_snaps = make_caches(g, {5, 3, 0}, *ops);
  CHECK(no_snaps.caches.snap_state.empty());
  CHECK(total(no_snaps) == 5 * unit.block + 3 * unit.slot);
  g.mla_layers = 0;
  CHECK(make_caches(g, {2, 1, 0}, *ops).caches.blocks.empty());
  g.mla_layers = 3;
  g.kda_layers = 0;
  CHECK(make_caches(g, {2, 1, 0}, *ops).caches.state.empty());
  for (const PoolSizes& sizes : {PoolSizes{1, 1, 0}, PoolSizes{2, 0, 0}, PoolSizes{2, 1, -1}})
    CHECK(testing::caught([&] { (void)make_caches(g, sizes, *ops); }).code == Code::internal);
}

}  // namespace
}  // namespace glm53
