// A model that is a hash, and an executor around it that keeps the books a real one would.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
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

/// The state of the fake model after some tokens: a hash of them all.
inline constexpr uint64_t kNoTokens = 1469598103934665603u;
inline uint64_t state_after(uint64_t state, int32_t token) {
  return (state ^ static_cast<uint64_t>(token + 1)) * 1099511628211u;
}
/// The token that follows in a state.
inline int32_t token_of(uint64_t state) {
  return static_cast<int32_t>((state >> 20) % kVocab);
}

inline int32_t next_token(const Tokens& so_far) {
  uint64_t state = kNoTokens;
  for (const int32_t t : so_far) state = state_after(state, t);
  return token_of(state);
}

/// Keeps what a ModelExecutor would: rows by block, state by slot and by snapshot. The next token is a hash of the
/// state and of the rows that the block table names, so that a wrong snapshot, a wrong block or a row that somebody
/// else wrote changes it. Contradictions fail the test at once.
class HashExecutor final : public Executor {
 public:
  explicit HashExecutor(const SchedulerLimits& limits)
      : limits_(limits),
        memory_(static_cast<size_t>(limits.blocks), Rows(kBlockTokens, Row{})),
        snaps_(static_cast<size_t>(limits.snaps)) {}

  void submit(const StepPlan& plan) override {
    REQUIRE((!last_step_ || plan.step == *last_step_ + 1));
    last_step_ = plan.step;
    if (spilled != nullptr) spill(plan);
    REQUIRE((spilled != nullptr || (plan.spill.empty() && plan.load.empty())));
    for (const auto& [slot, records] : plan.flush) {
      REQUIRE(slots_.at(slot).kept == records);
      slots_.at(slot).committed += records;
      slots_.at(slot).pending = slots_.at(slot).kept = 0;
    }
    for (const auto& [slot, snap] : plan.save) {
      REQUIRE(slots_.at(slot).pending == 0);
      snapshot(snap) = slots_.at(slot).state;
      ++saves;
    }
    for (const SlotId slot : plan.release) {
      slots_.erase(slot);
      std::erase_if(held_, [&](const SeqStep& s) { return s.slot == slot; });
    }
    size_t rows = 0, prompt_rows = 0, window_rows = 0;
    bool chunk_seen = false;
    std::set<SlotId> in_step;
    StepResult result;
    result.step = plan.step;
    // As the device does: restores and copies of all sequences, then the rows of all.
    for (const SeqStep& s : plan.seqs) prepare(s);
    for (const SeqStep& s : plan.seqs) {
      REQUIRE(in_step.insert(s.slot).second);
      chunk_seen = chunk_seen || s.regime == Regime::chunk;
      REQUIRE((s.regime == Regime::chunk || !chunk_seen));
      const size_t own = s.tokens.size() + static_cast<size_t>(s.propose);
      rows += own;
      (s.regime == Regime::chunk ? prompt_rows : window_rows) += own;
      if (s.regime == Regime::window || plan.piece == LayerSpan{}) run(s, result);
    }
    if (plan.piece != LayerSpan{}) piece(plan, prompt_rows, result);
    REQUIRE(rows <= static_cast<size_t>(limits_.max_rows));
    REQUIRE(prompt_rows <= static_cast<size_t>(limits_.prefill_chunk));
    most_seqs = std::max(most_seqs, plan.seqs.size());
    prompt_rows_run += prompt_rows;
    if (cost)
      result.device_ms = plan.piece == LayerSpan{} ? cost(window_rows, prompt_rows) : part_cost(plan, window_rows);
    results_.push_back(result);
  }
  std::optional<StepResult> poll() override {
    if (results_.empty()) return std::nullopt;
    StepResult r = results_.front();
    results_.pop_front();
    return r;
  }

  size_t parts = 0;  // steps that took a piece through some of the layers
  size_t most_seqs = 0, widest_window = 0, prompt_rows_run = 0, restores = 0, saves = 0;
  /// Drafts of the drafter behind tokens whose hash is given; those that come true where there is none.
  std::function<int32_t(uint64_t state)> drafter;
  size_t drafted = 0, accepted = 0;
  /// Milliseconds of a step with so many window and prompt rows.
  std::function<double(size_t, size_t)> cost;

  /// The spill tier: what the plans copied away. Outlives an executor, as files do.
  struct Spilled final : spill::Directory {
    struct Thing {
      spill::Meta meta;
      std::vector<std::pair<int32_t, int32_t>> rows;  // token, position
      uint64_t hash = 0;
      int32_t tokens = 0;
    };
    bool has(const spill::Name& name) const override { return things.contains(name); }
    bool wants(const spill::Name& name) const override { return !things.contains(name); }
    std::optional<uint8_t> cls_of(const spill::Name& name) const override {
      const auto at = things.find(name);
      return at == things.end() ? std::nullopt : std::optional(at->second.meta.cls);
    }
    std::map<spill::Name, Thing> things;
  };
  Spilled* spilled = nullptr;
  std::map<uint64_t, std::vector<SpillItem>> fetched;  ///< restores that are there

 private:
  void spill(const StepPlan& plan) {
    for (const SpillItem& item : plan.spill) {
      Spilled::Thing& thing = spilled->things[item.meta.name];
      thing = {};
      thing.meta = item.meta;
      if (item.meta.name.kind == spill::Kind::block) {
        require_block(BlockId{item.id});
        for (const Row& row : block(BlockId{item.id})) thing.rows.emplace_back(row.token, row.position);
      } else {
        thing.hash = snapshot(SnapId{item.id}).hash;
        thing.tokens = snapshot(SnapId{item.id}).tokens;
        REQUIRE(thing.tokens == item.meta.position);
      }
    }
    for (const auto& [restore, wanted] : plan.load) {
      REQUIRE(fetched.contains(restore));
      if (wanted) load(fetched.at(restore));
      fetched.erase(restore);
    }
  }
  void load(const std::vector<SpillItem>& items) {
    for (const SpillItem& item : items) {
      const Spilled::Thing& thing = spilled->things.at(item.meta.name);
      if (item.meta.name.kind == spill::Kind::block) {
        for (size_t i = 0; i < thing.rows.size(); ++i) {
          Row& row = block(BlockId{item.id})[i];
          row = {thing.rows[i].first, thing.rows[i].second, false};
        }
      } else {
        snapshot(SnapId{item.id}) = {thing.hash, thing.tokens};
      }
    }
  }
  /// What a row of the cache says: its token and where it stands. Before it is written, nothing that anybody hopes for.
  struct Row {
    int32_t token = -1, position = -1;
    bool window = false;  // it came out of the kernels that generate
  };
  using Rows = std::vector<Row>;
  struct State {
    uint64_t hash = kNoTokens;
    int32_t tokens = 0;
  };
  struct Slot {
    State state;
    std::vector<BlockId> table;
    int32_t committed = 0, pending = 0;
    int32_t kept = 0;  // of the pending rows: no drafts, or accepted ones
  };

  /// Some layers of a piece; what comes of it is there behind the last.
  void piece(const StepPlan& plan, size_t prompt_rows, StepResult& result) {
    ++parts;
    REQUIRE(plan.piece.last > plan.piece.first);
    REQUIRE(plan.piece.last <= limits_.layers);
    REQUIRE((plan.piece.first == 0) == (prompt_rows > 0));
    if (plan.piece.first == 0) {
      REQUIRE(held_.empty());
      held_rows_ = prompt_rows;
      for (const SeqStep& s : plan.seqs)
        if (s.regime == Regime::chunk) held_.push_back(s);
    } else {
      REQUIRE_FALSE(held_.empty());
      REQUIRE(plan.piece.first == held_at_);
    }
    held_at_ = plan.piece.last;
    if (held_at_ < limits_.layers) return;
    for (const SeqStep& s : held_) run(s, result);
    held_.clear();
  }
  double part_cost(const StepPlan& plan, size_t window_rows) const {
    const double alone = cost(window_rows, 0), layers = plan.piece.last - plan.piece.first;
    return alone + (cost(window_rows, held_rows_) - alone) * layers / limits_.layers;
  }

  void require_block(BlockId b) const {
    REQUIRE(static_cast<int32_t>(b) > 0);
    REQUIRE(static_cast<int32_t>(b) < limits_.blocks);
  }
  Rows& block(BlockId b) { return memory_[static_cast<size_t>(static_cast<int32_t>(b))]; }
  State& snapshot(SnapId id) {
    REQUIRE(static_cast<int32_t>(id) >= 0);
    REQUIRE(static_cast<int32_t>(id) < limits_.snaps);
    return snaps_[static_cast<size_t>(static_cast<int32_t>(id))];
  }

  void prepare(const SeqStep& s) {
    REQUIRE(static_cast<int32_t>(s.slot) >= 0);
    REQUIRE(static_cast<int32_t>(s.slot) < limits_.max_seqs);
    if (s.restore != SnapId::none) {
      slots_[s.slot] = {};
      slots_[s.slot].state = snapshot(s.restore);
      slots_[s.slot].committed = s.start;
      REQUIRE(slots_[s.slot].state.tokens == s.start);
      ++restores;
    } else if (s.start == 0) {
      slots_[s.slot] = {};
    }
    for (const auto& [from, to] : s.copy) {
      require_block(from);
      require_block(to);
      block(to) = block(from);
    }
  }

  void run(const SeqStep& s, StepResult& result) {
    Slot& slot = slots_.at(s.slot);
    for (const BlockId b : s.append) require_block(b);
    slot.table.insert(slot.table.end(), s.append.begin(), s.append.end());
    const auto known = static_cast<int32_t>(s.tokens.size()) - s.drafts, n = known + s.drafts + s.propose;
    REQUIRE(known > 0);
    REQUIRE((s.drafts == 0 || s.propose == 0));
    REQUIRE(s.drafts >= 0);
    REQUIRE(s.propose >= 0);
    REQUIRE(slot.committed + s.replay == s.start);
    REQUIRE(s.replay == slot.kept);
    REQUIRE(s.replay <= slot.pending);
    REQUIRE(slot.state.tokens == s.start);
    REQUIRE(static_cast<size_t>(s.start + n) <= slot.table.size() * kBlockTokens);
    REQUIRE(s.start + n <= limits_.max_context);
    REQUIRE(s.exports.size() <= 2);
    if (s.regime == Regime::chunk) {
      REQUIRE(n == known);
      REQUIRE(s.start % kChunk == 0);
      if (limits_.reuse_output != ReuseOutput::always) require_prompt_rows(slot, s.start);
      slot.committed = s.start + n;
      slot.pending = slot.kept = 0;
    } else {
      REQUIRE(n <= limits_.max_window);
      REQUIRE(s.exports.empty());
      widest_window = std::max(widest_window, static_cast<size_t>(n));
      slot.committed = s.start;
      slot.pending = n;
      slot.kept = known;
    }
    const auto write = [&](int32_t position, int32_t token) {
      block(slot.table[static_cast<size_t>(position / kBlockTokens)])[static_cast<size_t>(position % kBlockTokens)] = {
          token, position, s.regime == Regime::window};
    };
    for (int32_t i = 0; i < known; ++i) {
      const int32_t position = s.start + i, token = s.tokens[static_cast<size_t>(i)];
      write(position, token);
      slot.state = {state_after(slot.state.hash, token), position + 1};
      for (const auto& [at, id] : s.exports)
        if (at == position + 1) snapshot(id) = slot.state;
    }
    for (const auto& [at, id] : s.exports) REQUIRE((at > s.start && at <= s.start + n));
    if (s.logits > 0) result.seqs.push_back(verify(s, slot, known, write));
  }

  /// The rows of drafts are written whether or not they are accepted; the state goes on behind those that are.
  template <class Write>
  SeqResult verify(const SeqStep& s, Slot& slot, int32_t known, const Write& write) {
    const int32_t drafts = s.drafts + s.propose;
    REQUIRE(s.logits == 1 + drafts);
    Tokens draft(s.tokens.begin() + known, s.tokens.end());
    for (uint64_t state = slot.state.hash; static_cast<int32_t>(draft.size()) < drafts;) {
      draft.push_back(drafter ? drafter(state) : token_of(state));
      state = state_after(state, draft.back());
    }
    for (int32_t i = 0; i < drafts; ++i) write(s.start + known + i, draft[static_cast<size_t>(i)]);
    SeqResult r{.request = s.request, .tokens = {}, .drafted = static_cast<int16_t>(drafts), .accepted = 0};
    for (int32_t i = 0;; ++i) {
      r.tokens.push_back({.token = attend(slot), .logprob = 0, .top = {}});
      if (i == drafts || r.tokens.back().token != draft[static_cast<size_t>(i)]) break;
      slot.state = {state_after(slot.state.hash, draft[static_cast<size_t>(i)]), slot.state.tokens + 1};
      ++slot.kept;
      ++r.accepted;
    }
    drafted += static_cast<size_t>(drafts);
    accepted += static_cast<size_t>(r.accepted);
    return r;
  }

  /// A prompt is read behind rows of the prompt's kernels only, or its text would depend on who was here before.
  void require_prompt_rows(const Slot& slot, int32_t end) {
    for (int32_t p = 0; p < end; p += 16)
      REQUIRE_FALSE(
          block(slot.table[static_cast<size_t>(p / kBlockTokens)])[static_cast<size_t>(p % kBlockTokens)].window);
  }

  /// The next token, out of state and cache: the one that follows the tokens when both are right, else most likely not.
  int32_t attend(const Slot& slot) {
    uint64_t hash = kNoTokens;
    for (int32_t p = 0; p < slot.state.tokens; ++p) {
      const Row& row = block(slot.table[static_cast<size_t>(p / kBlockTokens)])[static_cast<size_t>(p % kBlockTokens)];
      hash = state_after(hash, row.position == p ? row.token : -2 - row.position);
    }
    const auto wrong = static_cast<int32_t>((slot.state.hash - hash) % (kVocab - 1));
    return (token_of(hash) + (slot.state.hash == hash ? 0 : 1 + wrong)) % kVocab;
  }

  const SchedulerLimits limits_;
  std::vector<Rows> memory_;
  std::vector<State> snaps_;
  std::map<SlotId, Slot> slots_;
  std::vector<SeqStep> held_;  // a piece in front of layer held_at_, without those that ended
  size_t held_rows_ = 0;
  int32_t held_at_ = 0;
  std::deque<StepResult> results_;
  std::optional<uint64_t> last_step_;
};

}  // namespace glm53::test
