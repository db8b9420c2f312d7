#include "engine/runtime/spill_tier.h"

#include <utility>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

size_t item_bytes(const Tensor& pool) {
  return pool.empty() ? 0 : pool.bytes() / static_cast<size_t>(pool.dim(0));
}

/// Plain bytes of one item; its pool is contiguous.
Tensor item_of(const Tensor& pool, int32_t id) {
  const size_t bytes = item_bytes(pool);
  return Tensor::of(static_cast<std::byte*>(pool.data) + static_cast<size_t>(id) * bytes, Dtype::u8,
                    {static_cast<int64_t>(bytes)}, pool.place);
}

}  // namespace

SpillTier::SpillTier(spill::StoreOptions options, const Caches& caches, Ops& ops)
    : caches_(caches), ops_(ops), store_(std::move(options)) {}

size_t SpillTier::block_bytes(const Caches& caches) {
  return item_bytes(caches.blocks);
}

size_t SpillTier::snapshot_bytes(const Caches& caches) {
  return item_bytes(caches.snap_state) + item_bytes(caches.snap_conv) + item_bytes(caches.snap_ring);
}

std::vector<Tensor> SpillTier::parts_of(const SpillItem& item) const {
  std::vector<Tensor> parts;
  const bool block = item.meta.name.kind == spill::Kind::block;
  for (const Tensor* pool : {&caches_.blocks, &caches_.snap_state, &caches_.snap_conv, &caches_.snap_ring}) {
    if (pool->empty() || (pool == &caches_.blocks) != block) continue;
    if (item.id < (block ? 1 : 0) || item.id >= pool->dim(0))
      throw Error(Code::internal,
                  cat("plan spills or restores ", block ? "block " : "snapshot ", item.id, " of ", pool->dim(0)));
    parts.push_back(item_of(*pool, item.id));
  }
  return parts;
}

void SpillTier::spill(const SpillItem& item) {
  const std::vector<Tensor> parts = parts_of(item);
  size_t bytes = 0;
  for (const Tensor& part : parts) bytes += part.bytes();
  std::vector<std::byte> payload(bytes);
  size_t at = 0;
  for (const Tensor& part : parts) {
    ops_.copy(Tensor::of(payload.data() + at, Dtype::u8, {static_cast<int64_t>(part.bytes())}), part);
    at += part.bytes();
  }
  ops_.synchronize();
  store_.put(item.meta, std::move(payload));
}

void SpillTier::fetch(uint64_t restore, std::vector<SpillItem> items, std::function<void(bool ok)> done) {
  std::vector<spill::Meta> wanted;
  for (const SpillItem& item : items) wanted.push_back(item.meta);
  store_.fetch(std::move(wanted), [this, restore, items = std::move(items), done = std::move(done)](spill::Fetched f) {
    const bool ok = f.missing.empty();
    {
      const std::lock_guard lock(mutex_);
      fetched_[restore] = {items, std::move(f.payloads)};
    }
    done(ok);
  });
}

/// What was loaded.
std::vector<SpillItem> SpillTier::load(uint64_t restore, bool wanted) {
  Fetched fetched;
  {
    const std::lock_guard lock(mutex_);
    const auto at = fetched_.find(restore);
    if (at == fetched_.end()) {
      if (!wanted) return {};
      throw Error(Code::internal, cat("plan uses restore ", restore, ", which this rank has not fetched"));
    }
    fetched = std::move(at->second);
    fetched_.erase(at);
  }
  if (!wanted) return {};
  if (fetched.payloads.size() != fetched.items.size())
    throw Error(Code::internal, cat("plan uses restore ", restore, ", which failed on this rank"));
  for (size_t i = 0; i < fetched.items.size(); ++i) {
    const std::vector<std::byte>& payload = *fetched.payloads[i];
    size_t at = 0;
    for (const Tensor& part : parts_of(fetched.items[i])) {
      if (at + part.bytes() > payload.size())
        throw Error(Code::internal, cat("restore ", restore, ": bytes are missing"));
      // Only read: copy() takes views that can be written through.
      auto* const from = const_cast<std::byte*>(payload.data() + at);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
      ops_.copy(part, Tensor::of(from, Dtype::u8, {static_cast<int64_t>(part.bytes())}));
      at += part.bytes();
    }
    if (at != payload.size())
      throw Error(Code::internal, cat("restore ", restore, ": ", payload.size() - at, " bytes too many"));
  }
  ops_.synchronize();  // the payloads go
  return std::move(fetched.items);
}

std::vector<SnapId> SpillTier::run(const StepPlan& plan) {
  for (const SpillItem& item : plan.spill) spill(item);
  std::vector<SnapId> written;
  for (const auto& [restore, wanted] : plan.load)
    for (const SpillItem& item : load(restore, wanted))
      if (item.meta.name.kind == spill::Kind::snapshot) written.push_back(SnapId{item.id});
  return written;
}

}  // namespace glm53
