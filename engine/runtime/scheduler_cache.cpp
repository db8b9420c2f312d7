#include "engine/runtime/scheduler_cache.h"

#include <algorithm>
#include <set>
#include <utility>

namespace glm53 {
namespace {

prefix::Options options_of(const CacheLimits& limits) {
  prefix::Options o;
  o.interval = limits.interval;
  if (limits.spill != nullptr) o.identity = limits.identity;
  return o;
}

SpillItem item_of(const prefix::Evicted& e) {
  const bool block = e.block != BlockId::null;
  SpillItem item;
  item.meta = meta_of(block ? spill::Kind::block : spill::Kind::snapshot, e.name, e.position, e.tokens);
  item.meta.cls = block ? uint8_t{0} : static_cast<uint8_t>(e.cls);
  item.id = block ? static_cast<int32_t>(e.block) : static_cast<int32_t>(e.snap);
  return item;
}

}  // namespace

spill::Meta meta_of(spill::Kind kind, const prefix::ChainHash& name, int32_t position,
                    std::span<const int32_t> tokens) {
  spill::Meta m;
  m.name = {kind, name};
  m.position = position;
  std::copy(tokens.begin(), tokens.end(), m.tokens.begin());
  return m;
}

SchedulerCache::SchedulerCache(const CacheLimits& limits)
    : limits_(limits), blocks_(1, limits.blocks - 1), snaps_(0, limits.snaps), index_(options_of(limits)) {}

bool SchedulerCache::could_take(size_t blocks) const {
  return blocks <= blocks_.available() || blocks <= blocks_.available() + index_.contents().evictable;
}

bool SchedulerCache::could_take_beside(std::span<const CacheGrant* const> staying, size_t blocks) const {
  std::vector<prefix::LeaseId> leases;
  std::set<BlockId> own;
  const auto add = [&](prefix::LeaseId lease, const std::vector<BlockId>& table) {
    leases.push_back(lease);
    for (const BlockId b : table)
      if (!index_.holds(b)) own.insert(b);
  };
  for (const CacheGrant* g : staying) add(g->lease, g->table);
  for (const auto& [lease, table] : leaving_) add(lease, table);
  // One more, which a hit inside a block holds until it is copied.
  return index_.held_by(leases) + own.size() + blocks + 1 <= blocks_.total();
}

void SchedulerCache::append(CacheGrant& grant, size_t blocks) {
  const auto more = blocks_.take(blocks);
  if (!more) throw Error(Code::internal, cat("the pool has no ", blocks, " blocks, though it should"));
  grant.table.insert(grant.table.end(), more->begin(), more->end());
}

bool SchedulerCache::make_room(size_t blocks) {
  if (blocks <= blocks_.available()) return true;
  if (!could_take(blocks)) return false;
  give(index_.evict_blocks(blocks - blocks_.available()));
  return blocks <= blocks_.available();
}

std::optional<CacheGrant> SchedulerCache::reserve(const CacheWish& wish, prefix::Time now) {
  CacheGrant grant;
  if (limits_.snaps == 0) {
    if (blocks_.available() < wish.blocks + wish.spare) return std::nullopt;
    grant.lease = index_.open(wish.salt);
    append(grant, wish.blocks);
    return grant;
  }
  prefix::Hit hit = index_.lookup(wish.salt, wish.prefix, now);
  grant.lease = hit.lease;
  grant.table = std::move(hit.shared);
  grant.position = hit.position;
  grant.restore = hit.restore;
  grant.copy = hit.copy;
  grant.copy_to = grant.table.size();
  grant.registered = hit.position;
  grant.base = hit.base;
  grant.exported = hit.position;
  grant.restoring = hit.position > 0;
  const size_t more = wish.blocks > grant.table.size() ? wish.blocks - grant.table.size() : 0;
  if (!could_take(more + wish.spare) || !make_room(more)) {
    release(grant, false);
    return std::nullopt;
  }
  append(grant, more);
  if (wish.write)
    grant.exports = prefix::plan_exports({.prompt = wish.prefix.prompt,
                                          .boundaries = wish.boundaries,
                                          .hit = hit.position,
                                          .matched = hit.matched,
                                          .interval = limits_.interval});
  return grant;
}

bool SchedulerCache::grow(CacheGrant& grant, size_t blocks) {
  if (blocks <= grant.table.size()) return true;
  const size_t more = blocks - grant.table.size();
  if (!make_room(more)) return false;
  append(grant, more);
  return true;
}

SnapId SchedulerCache::take_snapshot(prefix::SnapClass cls, int32_t saved, prefix::Time now) {
  if (snaps_.total() == 0) return SnapId::none;
  if (snaps_.available() == 0) {
    const auto lowest = index_.lowest_value(now);
    if (!lowest || *lowest > prefix::value(cls, 1, prefix::Time{0}, saved)) return SnapId::none;
    give(index_.evict_snapshots(1, now));
  }
  return snaps_.take().value_or(SnapId::none);
}

std::vector<prefix::NewSnapshot> SchedulerCache::exports(CacheGrant& grant, int32_t begin, int32_t end,
                                                         prefix::Time now) {
  std::vector<prefix::NewSnapshot> taken;
  for (const prefix::Export& e : prefix::exports_of_piece(grant.exports, begin, end)) {
    // A turn takes over from the turn that the request started from. So they never compete: the older one goes first.
    const bool takes_over = e.cls == prefix::SnapClass::turn && grant.exported == grant.position;
    if (takes_over) index_.pass(grant.lease);
    const SnapId id = take_snapshot(e.cls, e.position - (takes_over ? grant.base : grant.exported), now);
    if (id == SnapId::none) {
      if (takes_over) index_.pass(grant.lease, false);
      continue;
    }
    taken.push_back({e.position, id, e.cls});
    grant.exported = e.position;
  }
  std::erase_if(grant.exports, [end](const prefix::Export& e) { return e.position <= end; });
  return taken;
}

void SchedulerCache::restored(CacheGrant& grant) {
  if (!std::exchange(grant.restoring, false)) return;
  give(index_.settle(grant.lease));
}

void SchedulerCache::insert(CacheGrant& grant, const prefix::Prefix& finished, std::vector<prefix::NewSnapshot> snaps,
                            prefix::Time now) {
  grant.registered = static_cast<int32_t>(finished.tokens.size());
  give(index_.insert(grant.lease, {finished, grant.table, std::move(snaps)}, now));
}

void SchedulerCache::release(CacheGrant& grant, bool running) {
  give(index_.release(grant.lease, grant.table));
  if (grant.restoring && running)
    leaving_[grant.lease] = grant.table;
  else if (grant.restoring)
    give(index_.settle(grant.lease));
  grant = {};
}

void SchedulerCache::drop_restore(prefix::LeaseId lease) {
  if (leaving_.erase(lease) != 0) give(index_.settle(lease));
}

void SchedulerCache::drop(std::span<const prefix::NewSnapshot> snaps) {
  for (const prefix::NewSnapshot& s : snaps) snaps_.give(s.id);
}

void SchedulerCache::forget(uint64_t request) {
  give(index_.forget(request));
}

void SchedulerCache::clear() {
  give(index_.clear());
}

void SchedulerCache::give(const prefix::Freed& freed) {
  for (const BlockId b : freed.blocks) blocks_.give(b);
  for (const SnapId s : freed.snaps) snaps_.give(s);
  for (const prefix::Evicted& e : freed.evicted) {
    SpillItem item = item_of(e);
    if (limits_.spill->wants(item.meta.name) && !loading_.contains({item.meta.name.kind, item.id}))
      spills_.push_back(std::move(item));
  }
}

void SchedulerCache::check(std::span<const CacheGrant* const> grants, size_t written) const {
  index_.check();
  std::set<BlockId> own;  // of a sequence, and of nobody else
  size_t count = 0;
  const auto collect = [&](const std::vector<BlockId>& table) {
    for (const BlockId b : table) {
      if (index_.holds(b)) continue;
      own.insert(b);
      ++count;
    }
  };
  for (const CacheGrant* g : grants) collect(g->table);
  for (const auto& [lease, table] : leaving_) collect(table);
  if (own.size() != count) throw Error(Code::internal, cat(count - own.size(), " blocks belong to two sequences"));
  const prefix::Contents held = index_.contents();
  if (held.leases != grants.size() + leaving_.size())
    throw Error(Code::internal, cat("prefix index: ", held.leases, " leases, ", grants.size(), " sequences run, ",
                                    leaving_.size(), " are leaving"));
  blocks_.check(held.blocks + count, "block");
  snaps_.check(held.snaps + written, "snapshot");
}

}  // namespace glm53
