// The step plan: all a rank needs to know of a step, in one message; and the seam between scheduling and the model.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/bytes.h"
#include "engine/runtime/step_stages.h"
#include "engine/spill/spill_format.h"
#include "kernels/batch.h"

namespace glm53 {

/// One sequence's part of a step. Drafts are verified against what is sampled from the row before each; what the next
/// step of the sequence replays says on every rank how many were accepted.
struct SeqStep {
  uint64_t request = 0;
  SlotId slot = SlotId::none;
  Regime regime = Regime::chunk;
  int32_t start = 0;    ///< position of the first row
  int16_t drafts = 0;   ///< of the tokens, so many at the end are drafts (window regime)
  int16_t propose = 0;  ///< rows behind them that every rank's drafter fills with drafts; only where drafts is 0
  int16_t replay = 0;   ///< records of the last window to commit first
  std::vector<int32_t> tokens;                    ///< empty: one token, still on the device
  std::vector<BlockId> append;                    ///< new entries of the sequence's block table
  std::vector<std::pair<BlockId, BlockId>> copy;  ///< blocks to copy before the step (from, to)
  SnapId restore = SnapId::none;  ///< snapshot to load into the slot first; none at start 0 = zero state
  std::vector<std::pair<int32_t, SnapId>> exports;  ///< (position, snapshot), at most two
  int16_t logits = 0;  ///< how many last rows need logits; with drafts that is one more than there are of them
  bool operator==(const SeqStep&) const = default;
};

/// Bytes of the pools under the name of the prefix that they belong to.
struct SpillItem {
  spill::Meta meta;
  int32_t id = 0;  ///< BlockId or SnapId, as meta.name.kind says
  bool operator==(const SpillItem&) const = default;
};

struct StepPlan {
  uint64_t generation = 0, step = 0;
  int32_t bucket = 0;         ///< padded rows; 0 = as many as there are
  std::vector<SeqStep> seqs;  ///< window sequences first
  /// A piece of prompts may take several steps. {0, 0}: the chunk sequences of this step pass all layers. {0, n}: they
  /// form a piece that passes the first n only. {n, m}, without chunk sequences: that piece goes on; behind the last
  /// layer it is done, and its logits are this step's. A release of one of its slots takes the sequence out of it.
  LayerSpan piece;
  std::vector<std::pair<SlotId, int16_t>> flush;  ///< commit that many records before the step
  std::vector<std::pair<SlotId, SnapId>> save;    ///< states to save then, of slots without records
  std::vector<SlotId> release;                    ///< slots whose sequence ended; their block tables are forgotten
  std::vector<SpillItem> spill;                   ///< evicted: copied away before anything else is done
  std::vector<std::pair<uint64_t, bool>> load;    ///< restores whose bytes go into the pools next; or, false, nowhere
  bool operator==(const StepPlan&) const = default;
};

void put(ByteWriter& w, const std::vector<SpillItem>& items);
std::vector<SpillItem> get_spill_items(ByteReader& r);
/// Versioned, bounds-checked; decode throws Error(corrupt).
std::vector<std::byte> encode(const StepPlan& plan);
StepPlan decode_plan(std::span<const std::byte> frame);

struct SampledToken {
  int32_t token = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};
struct SeqResult {
  uint64_t request = 0;
  std::vector<SampledToken> tokens;  ///< accepted drafts and the token behind them; fewer where one of them ends it
  int16_t drafted = 0;               ///< drafts that were verified
  int16_t accepted = 0;              ///< of these: tokens.size() - 1
};
struct StepResult {
  uint64_t step = 0;
  std::vector<SeqResult> seqs;  ///< only sequences that asked for logits
  double device_ms = 0;
  double draft_ms = 0;  ///< of these, in the drafter
  StageCosts stages;
};

/// Runs plans in order. ModelExecutor on every rank; a hash executor stands in for it in scheduler tests. At most two
/// plans in flight.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void submit(const StepPlan& plan) = 0;
  /// Result of the oldest finished plan, if any. Rank 0 samples; results of other ranks are empty.
  virtual std::optional<StepResult> poll() = 0;
};

/// A constraint on the next token (grammar); declared here, implemented in text/, lives on rank 0.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  virtual bool terminated() const = 0;
  virtual void mask(std::span<uint32_t> bits) const = 0;
  virtual bool try_accept(int32_t token) = 0;
  virtual void rollback(int tokens) = 0;
};

}  // namespace glm53
