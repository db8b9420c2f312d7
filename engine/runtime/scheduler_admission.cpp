// Who runs: admission, growth, putting back. The policy stands in scheduler.cpp.
#include <algorithm>

#include "common/error.h"
#include "common/strings.h"
#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

constexpr size_t kAttempts = 16;  // requests that are passed over in one go
constexpr size_t kSpare = 100;    // one in so many blocks stays free when a request is admitted beside others

size_t blocks_of(size_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

}  // namespace

/// Output tokens of the request, those already emitted included; where it names no limit, what fits.
int32_t Scheduler::max_output_of(const wire::Submit& request) const {
  const int32_t context = limits_.max_context - static_cast<int32_t>(request.prompt.size());
  if (request.sampling.max_tokens > 0) return request.sampling.max_tokens;
  const auto pool = static_cast<int64_t>(cache_.blocks().total()) * kBlockTokens;
  return static_cast<int32_t>(
      std::clamp<int64_t>(pool - static_cast<int64_t>(request.prompt.size()), 1, std::max(context, 1)));
}

size_t Scheduler::blocks_of_all(const wire::Submit& request) const {
  return blocks_of(request.prompt.size() + static_cast<size_t>(max_output_of(request)));
}

size_t Scheduler::blocks_to_start(const wire::Submit& request) const {
  const size_t output = request.emitted.size() + static_cast<size_t>(limits_.reserve_output);
  return blocks_of(request.prompt.size() + std::min(output, static_cast<size_t>(max_output_of(request))));
}

// ---- admission

void Scheduler::hold_back(std::optional<size_t> longest_prompt) {
  if (longest_prompt == longest_prompt_) return;
  longest_prompt_ = longest_prompt;
  blocked_ = false;
}

WaitingQueue::Ids Scheduler::held_back() const {
  if (!longest_prompt_) return {};
  return waiting_.ids_if([&](const Waiting& w) {
    return w.request.prompt.size() > *longest_prompt_ && !w.preempted && !w.request.replayed;
  });
}

void Scheduler::admit() {
  if (blocked_) return;
  if (slots_.available() == 0 && !waiting_.empty()) {
    const int64_t least = waiting_.least_priority();
    blocked_ = std::none_of(running_.begin(), running_.end(), [&](const Sequence& s) { return s.cls > least; });
    if (blocked_) return;
  }
  WaitingQueue::Ids passed = held_back();
  for (const size_t most = passed.size() + kAttempts; passed.size() < most;) {
    const Waiting* next = waiting_.next(now_, passed);
    if (next == nullptr) break;
    if (admit(*next)) continue;
    if (next->restore == 0 && (next->preempted || now_ - next->since >= limits_.patience))
      break;  // nobody overtakes it
    passed.insert(next->request.id);
  }
  blocked_ = !waiting_.empty();
}

/// False when it has to wait; nothing has changed then.
bool Scheduler::admit(const Waiting& next) {
  if (start_restore(next)) return false;
  const wire::Submit& request = next.request;
  const size_t needed = blocks_to_start(request);
  const size_t spare = running_.empty() ? 0 : cache_.blocks().total() / kSpare;
  std::optional<CacheGrant> cache;
  if (slots_.available() > 0) cache = reserve(request, needed + spare);
  if (!cache && !could_displace(request, needed + spare)) return false;
  const uint64_t id = request.id;
  while (!cache) {
    const auto victim = last_of(request.priority);
    if (victim == running_.end()) throw Error(Code::internal, cat("request ", id, ": nobody is left to put back"));
    preempt(victim);
    cache = reserve(request, needed + spare);
  }
  std::optional<Waiting> taken = waiting_.take(id);
  start(std::move(*taken), std::move(*cache));
  return true;
}

/// Whether the request finds a slot and so many blocks when all that it may put back are.
bool Scheduler::could_displace(const wire::Submit& request, size_t blocks) const {
  std::vector<const CacheGrant*> staying;
  bool somebody = false;
  for (const auto& [id, restoring] : restores_) staying.push_back(&restoring.cache.grant);
  for (const Sequence& s : running_) {
    const bool displaced = s.cls > request.priority;
    somebody = somebody || displaced;
    // What a step restores into stays until that has finished.
    if (!displaced || (s.started && s.cache.restoring)) staying.push_back(&s.cache);
  }
  return somebody && cache_.could_take_beside(staying, blocks);
}

/// Blocks for the request, where `blocks` are to be had; those above what it needs to start are given back.
std::optional<CacheGrant> Scheduler::reserve(const wire::Submit& request, size_t blocks) {
  const size_t needed = blocks_to_start(request);
  std::vector<int32_t> all = request.prompt;
  all.insert(all.end(), request.emitted.begin(), request.emitted.end());
  const auto prompt = static_cast<int32_t>(request.prompt.size());
  // What it computed itself may be found again, wherever it was put back; of others, their prompts.
  return cache_.reserve({.salt = request.salt,
                         .prefix = {.tokens = all, .media = {}, .prompt = prompt, .request = request.id},
                         .boundaries = request.boundaries,
                         .blocks = needed,
                         .spare = blocks - needed,
                         .write = request.cache_write},
                        now_);
}

void Scheduler::start(Waiting waiting, CacheGrant cache) {
  Sequence seq = fresh();
  seq.arrival = waiting.arrival;
  seq.cls = waiting_.class_of(waiting, now_);
  seq.max_output = max_output_of(waiting.request);
  seq.cache = std::move(cache);
  seq.computed = seq.finished = seq.cache.position;
  seq.slot = slots_.take().value();
  seq.since = waiting.since;
  seq.output = waiting.request.emitted;
  seq.request = std::move(waiting.request);
  const int32_t reused = std::min(seq.cache.position, seq.prompt());
  if (!waiting.cached) {
    prefix_queries_ += seq.request.prompt.size();
    prefix_hits_ += static_cast<uint64_t>(reused);
  }
  seq.cached = waiting.cached.value_or(static_cast<uint32_t>(reused));
  waiting_.charge(seq.request.key, seq.prompt() - reused);
  sampling_.add(seq.request);
  running_.push_back(std::move(seq));
  by_id_[running_.back().request.id] = std::prev(running_.end());
}

// ---- leaving

/// Slot, blocks and sampling state become free.
void Scheduler::leave(Running::iterator at) {
  if (at->mark.id != SnapId::none) cache_.drop(std::span(&at->mark, 1));
  cache_.release(at->cache, at->started);
  slots_.give(at->slot);
  if (at->started) released_.push_back(at->slot);
  sampling_.remove(at->request.id);
  by_id_.erase(at->request.id);
  running_.erase(at);
  drop_dead_piece();
  blocked_ = false;
}

void Scheduler::end(Running::iterator at) {
  if (at->finished < at->prompt()) remember(*at, {});
  waiting_.leave(at->request.key);
  const uint64_t id = at->request.id;
  leave(at);
  cache_.forget(id);
}

/// The running sequence that is last in order, of those of a greater class; end() when there is none.
Scheduler::Running::iterator Scheduler::last_of(int64_t behind_class) {
  auto last = running_.end();
  for (auto at = running_.begin(); at != running_.end(); ++at)
    if (at->cls > behind_class && (last == running_.end() || last->before(*at))) last = at;
  return last;
}

void Scheduler::preempt(Running::iterator at) {
  ++preemptions_;
  save(*at);
  Waiting w;
  w.arrival = at->arrival;
  w.since = at->since;
  w.preempted = true;
  w.spill_tried = true;
  w.cached = at->cached;
  w.request = at->request;
  w.request.emitted = at->output;
  leave(at);
  waiting_.push(std::move(w));
}

/// Keeps what a sequence has computed where it finds it again: its blocks, and a snapshot of its state.
void Scheduler::save(Sequence& s) {
  if (limits_.snaps == 0) return;
  // With a step under way, or nothing of its own yet, what has been registered must do.
  if (s.finished != s.computed || !s.started || s.computed <= s.cache.registered) {
    if (s.finished < s.prompt()) remember(s, {});
    return;
  }
  // Full blocks of its prompt would be everybody's.
  if (!s.request.cache_write) return;
  const bool reading = s.computed < s.prompt();
  std::vector<prefix::NewSnapshot> snaps;
  const SnapId id = cache_.take_snapshot(prefix::SnapClass::interval, s.computed - s.cache.registered, now_);
  if (id == SnapId::none) {
    if (reading) remember(s, {});
    return;
  }
  snaps.push_back({s.computed, id, prefix::SnapClass::interval});
  if (s.pending > 0) flushes_.emplace_back(s.slot, s.pending);
  saves_.emplace_back(s.slot, id);
  cache_.written_later(id);
  std::vector<int32_t> tokens;
  for (int32_t p = 0; p < s.computed; ++p) tokens.push_back(s.token_at(p));
  cache_.insert(s.cache, {.tokens = tokens, .media = {}, .prompt = s.prompt(), .request = reading ? 0 : s.request.id},
                std::move(snaps), now_);
}

/// Registers the prompt as far as it has been read, with snapshots that were written.
void Scheduler::remember(Sequence& s, std::vector<prefix::NewSnapshot> snaps) {
  const int32_t count = std::min(s.finished, s.prompt());
  if (limits_.snaps == 0 || !s.request.cache_write || count <= s.cache.registered) {
    cache_.drop(snaps);
    return;
  }
  const std::span<const int32_t> tokens(s.request.prompt.data(), static_cast<size_t>(count));
  cache_.insert(s.cache, {.tokens = tokens, .media = {}, .prompt = s.prompt(), .request = 0}, std::move(snaps), now_);
}

/// Blocks for the rows that generating sequences are about to write.
void Scheduler::make_room_for_rows() {
  std::vector<std::pair<uint64_t, uint64_t>> short_of;  // by id and serial, as sequences may go meanwhile
  for (const Sequence& s : running_)
    if (s.generates() && s.cache.table.size() < blocks_of(static_cast<size_t>(s.total())))
      short_of.emplace_back(s.request.id, s.serial);
  const auto find = [&](const std::pair<uint64_t, uint64_t>& which) {
    const auto at = by_id_.find(which.first);
    return at != by_id_.end() && at->second->serial == which.second ? at->second : running_.end();
  };
  std::sort(short_of.begin(), short_of.end(), [&](const auto& a, const auto& b) { return find(a)->before(*find(b)); });
  for (const auto& which : short_of) {
    for (auto at = find(which); at != running_.end(); at = find(which)) {
      if (cache_.grow(at->cache, blocks_of(static_cast<size_t>(at->total())))) break;
      if (!give_up_restore()) preempt(last_of(INT64_MIN));
    }
  }
}

}  // namespace glm53
