// Runs step plans on the model; every rank has one, with the same plans.
#pragma once

#include <deque>
#include <vector>

#include "engine/model/model.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/sampling.h"

namespace glm53 {

/// Turns plans into batches and, on rank 0, logits into tokens. submit() runs the step; poll() gives its result.
/// Throws Error(internal) for plans that contradict what went before or the pools and for logits that are no numbers,
/// Error(peer_lost) out of collectives.
class ModelExecutor final : public Executor {
 public:
  /// `sampling` on rank 0, null elsewhere. All outlive the executor.
  ModelExecutor(Model& model, const Caches& caches, Ops& ops, SamplingTable* sampling);
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

  SlotState& slot_state(SlotId slot);
  void check(const SeqStep& step, const SlotState& state) const;
  void flush(const StepPlan& plan);
  void save(const StepPlan& plan);
  void prepare(const SeqStep& step);
  Batch build(const StepPlan& plan);
  void stage(const SeqStep& step, Batch& batch);
  void advance(const SeqStep& step);
  std::vector<SeqResult> sample(const StepPlan& plan, Tensor logits);
  void require_numbers(const std::vector<SeqResult>& results, Tensor logits) const;

  Model& model_;
  const Caches& caches_;
  Ops& ops_;
  SamplingTable* const sampling_;
  const int32_t max_blocks_;
  const int32_t blocks_, snaps_;
  std::vector<SlotState> slots_;
  Staging staging_;
  std::deque<StepResult> results_;
};

}  // namespace glm53
