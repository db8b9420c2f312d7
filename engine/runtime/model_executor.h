// Runs step plans on the model; every rank has one, with the same plans.
#pragma once

#include <deque>
#include <vector>

#include "engine/draft/drafter.h"
#include "engine/model/model.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/sampling.h"
#include "engine/runtime/spill_tier.h"
#include "engine/runtime/step_stages.h"

namespace glm53 {

/// Turns plans into batches and, on rank 0, logits into tokens. submit() runs the step; poll() gives its result.
/// Throws Error(internal) for plans that contradict what went before or the pools and for logits that are no numbers,
/// Error(peer_lost) out of collectives.
class ModelExecutor final : public Executor {
 public:
  /// `sampling` on rank 0, null elsewhere; `spill` and `drafter` (with its pools) null when there is none. All outlive
  /// the executor.
  ModelExecutor(Model& model, const Caches& caches, Ops& ops, SamplingTable* sampling, SpillTier* spill = nullptr,
                Drafter* drafter = nullptr);
  void submit(const StepPlan& plan) override;
  std::optional<StepResult> poll() override;

 private:
  /// What is known of a slot between steps.
  struct SlotState {
    std::vector<BlockId> table;
    int32_t committed = 0;  // tokens final in the slot's state
    int32_t pending = 0;    // records of the last window behind them
  };
  /// Host memory of a batch, sized for the limits once.
  struct Staging {
    std::vector<int32_t> token, position, row_seq, row_begin, slot, committed, replay, block_table, logit_row,
        export_pos, export_snap;
  };

  /// Sequences that pass the layers together.
  struct Member {
    uint64_t request = 0;
    SlotId slot = SlotId::none;  // none: given up on the way
    int16_t logits = 0;
    int32_t end = 0;  // behind its last row
  };
  struct Group {
    std::vector<Member> members;
    Staging staging;
    Batch batch;
  };

  SlotState& slot_state(SlotId slot);
  void check(const SeqStep& step, const SlotState& state) const;
  void flush(const StepPlan& plan);
  void save(const StepPlan& plan);
  void release(SlotId slot);
  void prepare(const SeqStep& step);
  void propose(const StepPlan& plan, StepResult& result);
  void begin(const StepPlan& plan);
  void check_piece(const StepPlan& plan) const;
  void stage(const SeqStep& step, std::span<const int32_t> proposed, Group& group);
  void close(Group& group) const;
  void want_logits(Group& group) const;
  void advance(const SeqStep& step, std::span<const int32_t> proposed);
  void pass(Group& group, std::optional<LayerSpan> layers, StepResult& result);
  void sample(const Group& group, Tensor logits, StepResult& result);
  void require_numbers(std::span<const uint64_t> requests, Tensor logits) const;
  static std::span<const int32_t> drafts_of(const Group& group, const Member& member);

  Model& model_;
  const Caches& caches_;
  Ops& ops_;
  SamplingTable* const sampling_;
  SpillTier* const spill_;
  Drafter* const drafter_;
  const WeightReads reads_;
  const double draft_bytes_;  // of the drafter's weights
  const int32_t max_blocks_;
  const int32_t blocks_, snaps_;
  std::vector<SlotState> slots_;
  std::vector<Draft> proposed_;  // of each sequence of the plan, by the drafter
  Group step_;                   // what passes all layers in a step
  Group piece_;                  // what passes some in each
  int32_t held_ = 0;             // the layer in front of which the piece stands; 0 = there is none
  std::deque<StepResult> results_;
};

}  // namespace glm53
