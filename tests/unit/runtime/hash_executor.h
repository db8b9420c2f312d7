// A model that is a hash, and an executor around it that keeps the books a real one would.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "engine/runtime/scheduler.h"

namespace glm53::test {

using Tokens = std::vector<int32_t>;
inline constexpr int32_t kVocab = 97;
inline const TokenSpace kSpace{.vocab = kVocab, .text_vocab = kVocab, .eos = {0}};

/// The fake model: the next token is a hash of all tokens so far.
inline int32_t next_token(const Tokens& so_far) {
  uint64_t h = 1469598103934665603u;
  for (const int32_t t : so_far) h = (h ^ static_cast<uint64_t>(t + 1)) * 1099511628211u;
  return static_cast<int32_t>((h >> 20) % kVocab);
}

/// Keeps what a ModelExecutor would: tokens by block, state by slot. Every contradiction fails the test.
class HashExecutor final : public Executor {
 public:
  explicit HashExecutor(const SchedulerLimits& limits) : limits_(limits) {}

  void submit(const StepPlan& plan) override {
    REQUIRE((!last_step_ || plan.step == *last_step_ + 1));
    last_step_ = plan.step;
    for (const SlotId slot : plan.release) slots_.erase(slot);
    size_t rows = 0, prompt_rows = 0;
    bool chunk_seen = false;
    std::set<SlotId> in_step;
    StepResult result;
    result.step = plan.step;
    for (const SeqStep& s : plan.seqs) {
      REQUIRE(in_step.insert(s.slot).second);
      chunk_seen = chunk_seen || s.regime == Regime::chunk;
      REQUIRE((s.regime == Regime::chunk || !chunk_seen));
      rows += s.tokens.size();
      if (s.regime == Regime::chunk) prompt_rows += s.tokens.size();
      run(s, result);
    }
    REQUIRE(rows <= static_cast<size_t>(limits_.max_rows));
    REQUIRE(prompt_rows <= static_cast<size_t>(limits_.prefill_chunk));
    most_seqs = std::max(most_seqs, plan.seqs.size());
    widest_window = std::max(widest_window, window_);
    results_.push_back(result);
  }
  std::optional<StepResult> poll() override {
    if (results_.empty()) return std::nullopt;
    StepResult r = results_.front();
    results_.pop_front();
    return r;
  }

  size_t most_seqs = 0, widest_window = 0;

 private:
  struct Slot {
    Tokens tokens;
    std::vector<BlockId> table;
    int32_t committed = 0, pending = 0;
  };

  void run(const SeqStep& s, StepResult& result) {
    REQUIRE(static_cast<int32_t>(s.slot) >= 0);
    REQUIRE(static_cast<int32_t>(s.slot) < limits_.max_seqs);
    if (s.start == 0) slots_[s.slot] = {};
    Slot& slot = slots_.at(s.slot);
    slot.table.insert(slot.table.end(), s.append.begin(), s.append.end());
    for (const BlockId b : s.append) {
      REQUIRE(static_cast<int32_t>(b) > 0);
      REQUIRE(static_cast<int32_t>(b) < limits_.blocks);
      owner_[b] = s.request;
    }
    const auto n = static_cast<int32_t>(s.tokens.size());
    REQUIRE(n > 0);
    REQUIRE(slot.committed + s.replay == s.start);
    REQUIRE(s.replay == slot.pending);
    REQUIRE(static_cast<int32_t>(slot.tokens.size()) == s.start);
    slot.tokens.insert(slot.tokens.end(), s.tokens.begin(), s.tokens.end());
    REQUIRE(slot.tokens.size() <= slot.table.size() * kBlockTokens);
    for (const BlockId b : slot.table) REQUIRE(owner_.at(b) == s.request);
    if (s.regime == Regime::chunk) {
      REQUIRE(s.start % kChunk == 0);
      slot.committed = s.start + n;
      slot.pending = 0;
    } else {
      REQUIRE(n <= limits_.max_window);
      window_ = static_cast<size_t>(n);
      slot.committed = s.start;
      slot.pending = n;
    }
    if (s.logits == 1)
      result.seqs.push_back({.request = s.request,
                             .tokens = {{.token = next_token(slot.tokens), .logprob = 0, .top = {}}},
                             .accepted = 0});
  }

  const SchedulerLimits limits_;
  std::map<SlotId, Slot> slots_;
  std::map<BlockId, uint64_t> owner_;
  std::deque<StepResult> results_;
  std::optional<uint64_t> last_step_;
  size_t window_ = 0;
};

}  // namespace glm53::test
