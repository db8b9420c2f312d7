// Pools of cache memory for a geometry.
#include <array>
#include <utility>

#include "common/error.h"
#include "common/strings.h"
#include "engine/model/model.h"

namespace glm53 {
namespace {

/// Shape of one slot's or snapshot's part of each pool; the id is the outermost dimension in front of it.
struct Shapes {
  using Part = std::array<int64_t, 3>;
  Part state, conv, records, ring, snap_conv;

  explicit Shapes(const CacheGeometry& g) {
    const int64_t kda = g.kda_layers, mla = g.mla_layers, dim = g.head_dim;
    state = {kda, g.kda_heads, dim * dim};
    conv = {kda, g.conv_columns(), g.conv_channels};
    records = {kda, g.max_window, g.record_width()};
    ring = {mla, g.ring(), int64_t{2} * g.index_dim};
    snap_conv = {kda, g.conv_kernel - 1, g.conv_channels};
  }
};

size_t bytes_of(const Shapes::Part& part, Dtype dtype) {
  return static_cast<size_t>(part[0] * part[1] * part[2]) * size_of(dtype);
}

}  // namespace

PoolUnit pool_unit(const CacheGeometry& geometry, Dtype activation) {
  const Shapes s(geometry);
  PoolUnit unit;
  unit.block = block_layout(geometry).block_bytes;
  const size_t state = bytes_of(s.state, Dtype::f32), ring = bytes_of(s.ring, activation);
  unit.slot = state + bytes_of(s.conv, activation) + bytes_of(s.records, Dtype::f32) + ring;
  unit.snap = state + bytes_of(s.snap_conv, activation) + ring;
  return unit;
}

OwnedCaches make_caches(const CacheGeometry& geometry, const PoolSizes& sizes, Ops& ops) {
  if (sizes.blocks < 2 || sizes.slots < 1 || sizes.snaps < 0)
    throw Error(
        Code::internal,
        cat("cache pools of ", sizes.blocks, " blocks, ", sizes.slots, " slots and ", sizes.snaps, " snapshots"),
        "at least 2 blocks (block 0 is never used) and 1 slot");
  const Shapes s(geometry);
  const Dtype act = ops.activation();
  OwnedCaches owned;
  Caches& c = owned.caches;
  c.geometry = geometry;
  c.layout = block_layout(geometry);
  const auto pool = [&](int ids, const Shapes::Part& part, Dtype dtype) {
    if (ids == 0 || bytes_of(part, dtype) == 0) return Tensor{};
    owned.memory.push_back(ops.allocate(static_cast<size_t>(ids) * bytes_of(part, dtype), Place::device));
    return owned.memory.back().view(dtype, {ids, part[0], part[1], part[2]});
  };
  if (c.layout.block_bytes != 0) {
    owned.memory.push_back(ops.allocate(static_cast<size_t>(sizes.blocks) * c.layout.block_bytes, Place::device));
    c.blocks = owned.memory.back().view(Dtype::u8, {sizes.blocks, static_cast<int64_t>(c.layout.block_bytes)});
  }
  c.state = pool(sizes.slots, s.state, Dtype::f32);
  c.conv = pool(sizes.slots, s.conv, act);
  c.records = pool(sizes.slots, s.records, Dtype::f32);
  c.ring = pool(sizes.slots, s.ring, act);
  c.snap_state = pool(sizes.snaps, s.state, Dtype::f32);
  c.snap_conv = pool(sizes.snaps, s.snap_conv, act);
  c.snap_ring = pool(sizes.snaps, s.ring, act);
  return owned;
}

}  // namespace glm53
