// Text that comes back from the spill tier: what the cache has to do for it (SchedulerCache), and the requests that
// wait for it (Scheduler).
#include <algorithm>
#include <utility>

#include "common/error.h"
#include "common/strings.h"
#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

constexpr size_t kRestores = 4;  // at the same time

/// Where text comes back to: the deepest snapshot that can be reached.
struct Target {
  size_t blocks = 0;
  prefix::SnapClass cls = prefix::SnapClass::interval;
  std::vector<prefix::ChainHash> chain;  // of its blocks
};

prefix::Slice slice_at(const prefix::Prefix& prompt, size_t block, std::vector<prefix::MediaPart>& media) {
  const auto begin = static_cast<int32_t>(block * kBlockTokens);
  media = prefix::media_of_block(prompt.media, begin, kBlockTokens);
  return {0, prompt.tokens.subspan(block * kBlockTokens, kBlockTokens), media};
}

}  // namespace

// ---- the cache

std::optional<CacheRestore> SchedulerCache::find_spilled(std::string_view salt, const prefix::Prefix& prompt,
                                                         prefix::Time now) {
  if (limits_.spill == nullptr || prompt.tokens.size() <= kBlockTokens) return std::nullopt;
  const prefix::Hit hit = index_.hold_path(salt, prompt);
  CacheRestore out;
  out.grant.lease = hit.lease;
  out.grant.table = hit.shared;
  Target target;
  prefix::ChainHash name = prefix::chain_root(limits_.identity, salt);
  // The last token is computed in any case.
  const size_t most = std::min((prompt.tokens.size() - 1) / kBlockTokens, hit.shared.size() + limits_.restore_blocks);
  for (size_t i = 0; i < most; ++i) {
    std::vector<prefix::MediaPart> media;
    name = prefix::chain_next(name, slice_at(prompt, i, media));
    target.chain.push_back(name);
    if (i >= hit.shared.size() && !limits_.spill->has({spill::Kind::block, name})) break;
    if (static_cast<int32_t>((i + 1) * kBlockTokens) <= hit.position) continue;
    if (const auto cls = limits_.spill->cls_of({spill::Kind::snapshot, name})) {
      target.blocks = i + 1;
      target.cls = static_cast<prefix::SnapClass>(std::min(*cls, static_cast<uint8_t>(prefix::SnapClass::divergence)));
    }
  }
  const auto position = static_cast<int32_t>(target.blocks * kBlockTokens);
  const size_t more = target.blocks > hit.shared.size() ? target.blocks - hit.shared.size() : 0;
  if (target.blocks > 0 && make_room(more))
    out.snap = {position, take_snapshot(target.cls, position - hit.position, now), target.cls};
  if (out.snap.id == SnapId::none) {
    release(out.grant, false);
    return std::nullopt;
  }
  append(out.grant, more);
  for (size_t i = hit.shared.size(); i < target.blocks; ++i) {
    const auto tokens = prompt.tokens.subspan(i * kBlockTokens, kBlockTokens);
    out.items.push_back(
        {meta_of(spill::Kind::block, target.chain[i], static_cast<int32_t>((i + 1) * kBlockTokens), tokens),
         static_cast<int32_t>(out.grant.table[i])});
  }
  const auto last = prompt.tokens.subspan((target.blocks - 1) * kBlockTokens, kBlockTokens);
  out.items.push_back({meta_of(spill::Kind::snapshot, target.chain[target.blocks - 1], position, last),
                       static_cast<int32_t>(out.snap.id)});
  return out;
}

void SchedulerCache::restored(CacheRestore& restore, bool ok, const prefix::Prefix& prompt, prefix::Time now) {
  if (ok) {
    for (const SpillItem& item : restore.items) loading_.insert({item.meta.name.kind, item.id});
    prefix::Prefix complete = prompt;
    complete.tokens = prompt.tokens.first(static_cast<size_t>(restore.snap.position));
    give(index_.insert(restore.grant.lease, {complete, restore.grant.table, {restore.snap}}, now));
  } else {
    snaps_.give(restore.snap.id);
  }
  release(restore.grant, false);
}

std::vector<SpillItem> SchedulerCache::take_spills() {
  loading_.clear();
  return std::exchange(spills_, {});
}

// ---- requests that wait for it

/// True when the request's text is on its way, or will be: it does not start now.
bool Scheduler::start_restore(const Waiting& next) {
  if (next.restore != 0) return true;
  if (next.spill_tried) return false;
  if (restores_.size() >= kRestores) return false;
  const wire::Submit& request = next.request;
  auto found = cache_.find_spilled(request.salt, prompt_of(request), now_);
  Waiting* const waiting = waiting_.find(request.id);
  waiting->spill_tried = true;
  if (!found) return false;
  const uint64_t id = ++last_restore_;
  waiting->restore = id;
  orders_.push_back({id, found->items});
  restores_.emplace(id, Restoring{request.id, std::move(*found)});
  return true;
}

std::vector<RestoreOrder> Scheduler::take_restores() {
  return std::exchange(orders_, {});
}

void Scheduler::restored(uint64_t id, bool ok) {
  const auto at = restores_.find(id);
  loads_.emplace_back(id, ok && at != restores_.end());
  if (at == restores_.end()) return;
  Waiting* const waiting = waiting_.find(at->second.request);
  if (waiting == nullptr)
    throw Error(Code::internal, cat("restore ", id, ": request ", at->second.request, " does not wait"));
  waiting->restore = 0;
  if (ok)
    ++restores_done_;
  else
    ++restores_failed_;
  cache_.restored(at->second.cache, ok, prompt_of(waiting->request), now_);
  restores_.erase(at);
  blocked_ = false;
}

/// The request does not wait any more. What is still fetched for it goes nowhere.
void Scheduler::abandon_restore(const Waiting& waiting) {
  const auto at = restores_.find(waiting.restore);
  if (at == restores_.end()) return;
  cache_.restored(at->second.cache, false, {}, now_);
  restores_.erase(at);
  blocked_ = false;
}

/// For the sake of those that run: the newest; its request is computed. False when there is none.
bool Scheduler::give_up_restore() {
  if (restores_.empty()) return false;
  Waiting* const waiting = waiting_.find(restores_.rbegin()->second.request);
  if (waiting == nullptr) throw Error(Code::internal, "a restore is under way for a request that does not wait");
  abandon_restore(*waiting);
  waiting->restore = 0;
  return true;
}

}  // namespace glm53
