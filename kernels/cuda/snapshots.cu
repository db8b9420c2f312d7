// Saving, restoring and clearing what a slot holds, and copying blocks.
#include <string>

#include "common/error.h"
#include "kernels/cuda/cuda_ops.h"

namespace glm53::cuda {
namespace {

size_t item_bytes(const Tensor& t) {
  return t.bytes() / static_cast<size_t>(t.dim(0));
}

std::byte* item(std::string_view op, const Tensor& t, int64_t id, int64_t first = 0) {
  if (id < first || id >= t.dim(0) || !t.contiguous() || t.place == Place::host) {
    throw Error(Code::internal, std::string(op) + ": id " + std::to_string(id) + " is outside the pool",
                "expected " + std::to_string(first) + " to " + std::to_string(t.dim(0) - 1));
  }
  return static_cast<std::byte*>(t.data) + static_cast<size_t>(id) * item_bytes(t);
}

}  // namespace

// Pools of kinds of layers that a model does not have are empty, on both sides.
void CudaOps::copy_item(std::string_view op, const Tensor& to, int64_t to_id, const Tensor& from, int64_t from_id) {
  if (to.empty() && from.empty()) return;
  std::byte* target = item(op, to, to_id);
  const std::byte* source = item(op, from, from_id);
  expect_that(item_bytes(to) == item_bytes(from), op, "one item differs in size between slots and snapshots");
  check(cudaMemcpyAsync(target, source, item_bytes(from), cudaMemcpyDefault, stream()), op);
}

// The history columns of every layer; live slots have further columns after them, snapshots do not.
void CudaOps::copy_history(std::string_view op, const Caches& c, const Tensor& to, int64_t to_id, const Tensor& from,
                           int64_t from_id) {
  if (to.empty() && from.empty()) return;
  std::byte* target = item(op, to, to_id);
  const std::byte* source = item(op, from, from_id);
  const auto layers = static_cast<size_t>(c.geometry.kda_layers);
  const size_t from_layer = item_bytes(from) / layers, to_layer = item_bytes(to) / layers;
  const size_t bytes = static_cast<size_t>(c.geometry.conv_kernel - 1) * static_cast<size_t>(c.geometry.conv_channels) *
                       size_of(from.dtype);
  expect_that(from.dtype == to.dtype && from_layer >= bytes && to_layer >= bytes, op,
              "conv or snap_conv is smaller than the history of a layer");
  check(cudaMemcpy2DAsync(target, to_layer, source, from_layer, bytes, layers, cudaMemcpyDefault, stream()), op);
}

void CudaOps::snapshot_save(const Caches& c, SlotId from, SnapId to) {
  const auto slot = static_cast<int64_t>(from), snap = static_cast<int64_t>(to);
  copy_item("snapshot_save", c.snap_state, snap, c.state, slot);
  copy_history("snapshot_save", c, c.snap_conv, snap, c.conv, slot);
  copy_item("snapshot_save", c.snap_ring, snap, c.ring, slot);
}

void CudaOps::snapshot_restore(const Caches& c, SnapId from, SlotId to) {
  const auto slot = static_cast<int64_t>(to), snap = static_cast<int64_t>(from);
  copy_item("snapshot_restore", c.state, slot, c.snap_state, snap);
  copy_history("snapshot_restore", c, c.conv, slot, c.snap_conv, snap);
  copy_item("snapshot_restore", c.ring, slot, c.snap_ring, snap);
}

void CudaOps::slot_reset(const Caches& c, SlotId slot) {
  for (const Tensor* t : {&c.state, &c.conv, &c.ring}) {
    if (t->empty()) continue;
    check(cudaMemsetAsync(item("slot_reset", *t, static_cast<int64_t>(slot)), 0, item_bytes(*t), stream()),
          "slot_reset");
  }
}

void CudaOps::block_copy(const Caches& c, BlockId from, BlockId to) {
  if (c.blocks.empty()) return;
  std::byte* target = item("block_copy", c.blocks, static_cast<int64_t>(to), 1);
  const std::byte* source = item("block_copy", c.blocks, static_cast<int64_t>(from), 1);
  if (from == to) return;
  check(cudaMemcpyAsync(target, source, item_bytes(c.blocks), cudaMemcpyDefault, stream()), "block_copy");
}

}  // namespace glm53::cuda
