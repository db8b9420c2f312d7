// Saving, restoring and clearing what a slot holds, and copying blocks.
#include <cstring>
#include <string>

#include "common/error.h"
#include "kernels/cpu/cpu_ops.h"

namespace glm53::cpu {
namespace {

void check_id(std::string_view op, std::string_view pool, const Tensor& t, int64_t id, int64_t first) {
  if (id >= first && id < t.dim(0) && t.contiguous() && t.place != Place::device) return;
  throw Error(Code::internal, std::string(op) + ": id " + std::to_string(id) + " is outside " + std::string(pool),
              "expected " + std::to_string(first) + " to " + std::to_string(t.dim(0) - 1));
}

std::byte* part(const Tensor& t, int64_t id) {
  return static_cast<std::byte*>(t.data) + static_cast<size_t>(id) * (t.bytes() / static_cast<size_t>(t.dim(0)));
}

// Pools of kinds of layers that a model does not have are empty, on both sides.
void copy_item(std::string_view op, std::string_view name, const Tensor& to, int64_t to_id, const Tensor& from,
               int64_t from_id) {
  if (to.empty() && from.empty()) return;
  check_id(op, name, from, from_id, 0);
  check_id(op, name, to, to_id, 0);
  const size_t bytes = from.bytes() / static_cast<size_t>(from.dim(0));
  if (bytes != to.bytes() / static_cast<size_t>(to.dim(0))) {
    throw Error(Code::internal, std::string(op) + ": one item of " + std::string(name) + " differs in size between " +
                                    "slots and snapshots");
  }
  std::memcpy(part(to, to_id), part(from, from_id), bytes);
}

void zero_item(std::string_view op, std::string_view name, const Tensor& t, int64_t id) {
  if (t.empty()) return;
  check_id(op, name, t, id, 0);
  std::memset(part(t, id), 0, t.bytes() / static_cast<size_t>(t.dim(0)));
}

// The history columns of every layer; live slots have further columns after them, snapshots do not.
void copy_history(std::string_view op, const CacheGeometry& g, const Tensor& to, int64_t to_id, const Tensor& from,
                  int64_t from_id) {
  if (to.empty() && from.empty()) return;
  check_id(op, "conv", from, from_id, 0);
  check_id(op, "conv", to, to_id, 0);
  const auto layers = static_cast<size_t>(g.kda_layers);
  const size_t from_layer = from.bytes() / static_cast<size_t>(from.dim(0)) / layers;
  const size_t to_layer = to.bytes() / static_cast<size_t>(to.dim(0)) / layers;
  const size_t bytes = static_cast<size_t>(g.conv_kernel - 1) * static_cast<size_t>(g.conv_channels) * sizeof(float);
  if (from_layer < bytes || to_layer < bytes) {
    throw Error(Code::internal, std::string(op) + ": conv or snap_conv is smaller than the history of a layer");
  }
  for (size_t layer = 0; layer < layers; ++layer) {
    std::memcpy(part(to, to_id) + layer * to_layer, part(from, from_id) + layer * from_layer, bytes);
  }
}

}  // namespace

void CpuOps::snapshot_save(const Caches& c, SlotId from, SnapId to) {
  const auto slot = static_cast<int64_t>(from), snap = static_cast<int64_t>(to);
  copy_item("snapshot_save", "state", c.snap_state, snap, c.state, slot);
  copy_history("snapshot_save", c.geometry, c.snap_conv, snap, c.conv, slot);
  copy_item("snapshot_save", "ring", c.snap_ring, snap, c.ring, slot);
}

void CpuOps::snapshot_restore(const Caches& c, SnapId from, SlotId to) {
  const auto slot = static_cast<int64_t>(to), snap = static_cast<int64_t>(from);
  copy_item("snapshot_restore", "state", c.state, slot, c.snap_state, snap);
  copy_history("snapshot_restore", c.geometry, c.conv, slot, c.snap_conv, snap);
  copy_item("snapshot_restore", "ring", c.ring, slot, c.snap_ring, snap);
}

void CpuOps::slot_reset(const Caches& c, SlotId slot) {
  const auto id = static_cast<int64_t>(slot);
  zero_item("slot_reset", "state", c.state, id);
  zero_item("slot_reset", "conv", c.conv, id);
  zero_item("slot_reset", "ring", c.ring, id);
}

void CpuOps::block_copy(const Caches& c, BlockId from, BlockId to) {
  if (c.blocks.empty()) return;
  check_id("block_copy", "blocks", c.blocks, static_cast<int64_t>(from), 1);
  check_id("block_copy", "blocks", c.blocks, static_cast<int64_t>(to), 1);
  if (from != to) {
    const auto bytes = c.blocks.bytes() / static_cast<size_t>(c.blocks.dim(0));
    std::memcpy(part(c.blocks, static_cast<int64_t>(to)), part(c.blocks, static_cast<int64_t>(from)), bytes);
  }
}

}  // namespace glm53::cpu
