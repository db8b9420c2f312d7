// What becomes of generated text (cache.reuse_output). The policy stands in scheduler.cpp.
#include <algorithm>
#include <utility>

#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

constexpr size_t kRereads = 32;                     // texts that wait; the oldest is given up
constexpr uint64_t kRereadIds = uint64_t{1} << 63;  // requests have lower ones
constexpr std::string_view kRereadKey = "\x01reread";

}  // namespace

/// The request has ended well, with so many tokens of output as its answer.
void Scheduler::keep_output(Sequence& s, size_t kept) {
  if (limits_.snaps == 0 || !s.request.cache_write || s.reread) return;
  kept = std::min(kept, s.output.size());
  if (limits_.reuse_output == ReuseOutput::always) share_output(s, kept);
  if (limits_.reuse_output != ReuseOutput::idle || draining_) return;
  // The last multiple of 64 in the prompt has a snapshot already, or was not worth one.
  if ((s.prompt() + static_cast<int32_t>(kept)) / kChunk == s.prompt() / kChunk) return;
  Reread text{s.request.salt, s.request.prompt};
  text.tokens.insert(text.tokens.end(), s.output.begin(), s.output.begin() + static_cast<std::ptrdiff_t>(kept));
  rereads_.push_back(std::move(text));
  if (rereads_.size() > kRereads) rereads_.pop_front();
}

/// Registers output up to the mark as if it were a prompt's.
void Scheduler::share_output(Sequence& s, size_t kept) {
  const int32_t end = s.mark.position;
  if (s.mark.id == SnapId::none || end > s.prompt() + static_cast<int32_t>(kept)) return;
  std::vector<int32_t> tokens;
  for (int32_t p = 0; p < end; ++p) tokens.push_back(s.token_at(p));
  cache_.insert(s.cache, {.tokens = tokens, .media = {}, .prompt = end, .request = 0}, {std::exchange(s.mark, {})},
                now_);
}

/// Keeps the state of a sequence that has just reached a multiple of 64 in its output. A later prompt can only start at
/// one.
void Scheduler::mark(Sequence& s) {
  if (limits_.snaps == 0 || !s.request.cache_write || s.finished != s.computed || s.computed <= s.prompt() ||
      s.computed % kChunk != 0)
    return;
  if (s.mark.id == SnapId::none)
    s.mark.id = cache_.take_snapshot(prefix::SnapClass::output, s.computed - s.cache.exported, now_);
  if (s.mark.id == SnapId::none) return;
  s.mark.position = s.computed;
  s.mark.cls = prefix::SnapClass::output;
  if (s.pending > 0) flushes_.emplace_back(s.slot, s.pending);
  s.pending = 0;
  saves_.emplace_back(s.slot, s.mark.id);
}

/// Begins to read text again when there is nothing else to do.
void Scheduler::reread() {
  while (running_.empty() && waiting_.empty() && !rereads_.empty()) {
    Reread text = std::move(rereads_.back());
    rereads_.pop_back();
    start_reread(std::move(text));
  }
}

/// False when it is known already, or does not fit.
bool Scheduler::start_reread(Reread text) {
  const auto end = static_cast<int32_t>(text.tokens.size()) / kChunk * kChunk;
  Sequence seq = fresh();
  seq.reread = true;
  seq.request.id = kRereadIds + ++last_reread_;
  seq.request.key = kRereadKey;
  seq.request.salt = std::move(text.salt);
  seq.request.boundaries = {end};
  const auto all = static_cast<int32_t>(text.tokens.size());
  auto grant = cache_.reserve({.salt = seq.request.salt,
                               .prefix = {.tokens = text.tokens, .media = {}, .prompt = all, .request = 0},
                               .boundaries = seq.request.boundaries,
                               .blocks = static_cast<size_t>(end / kBlockTokens),
                               .spare = 0,
                               .write = true},
                              now_);
  if (!grant) return false;
  if (grant->position >= end) {
    cache_.release(*grant, false);
    return false;
  }
  text.tokens.resize(static_cast<size_t>(end));
  seq.request.prompt = std::move(text.tokens);
  seq.arrival = ++arrivals_;
  seq.cache = std::move(*grant);
  seq.computed = seq.finished = seq.cache.position;
  seq.slot = slots_.take().value();
  sampling_.add(seq.request);
  waiting_.enter(seq.request.key);
  running_.push_back(std::move(seq));
  by_id_[running_.back().request.id] = std::prev(running_.end());
  return true;
}

/// Somebody has come. What was read stays known; the rest waits again.
void Scheduler::stop_reread() {
  if (!rereads()) return;
  rereads_.push_back({running_.front().request.salt, running_.front().request.prompt});
  end(running_.begin());
}

}  // namespace glm53
