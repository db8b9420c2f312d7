// Drafters that are models themselves: they read what the target computes and propose the tokens behind an anchor.
//
// Notation (spec speculative §0): `n` positions of a sequence are committed, 0 … n−1; the anchor x_n is sampled but has
// not been through the target. A draft is a token for position n+1, n+2, …
//
// Every rank owns one drafter and all ranks call it alike, in the same order, inside a step: the drafter uses the
// target's communicator, and every rank gets the same drafts, bit for bit. Drafts decide how fast text comes, never
// which text; nothing here changes the target's results.
//
// What became of the drafts of a step is never told: it shows in the next call. Rows of a window that were rejected lie
// at or behind the position of the next propose() or observe() of that slot, and are dropped or overwritten then. So
// observe() can follow the pass at once, on every rank, before anybody knows what was accepted.
//
// A call in a step, in this order:
//   save / restore / reset / invalidate / copy_block   as the plan says, before the pass
//   propose()                                          for the sequences that want drafts, before the pass
//   the target's pass
//   observe()                                          after each pass that gave a result (a piece of a prompt that is
//                                                      held between layers: when it has come out of the last one)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/model/model.h"
#include "kernels/batch.h"

namespace glm53 {

struct DraftTraits {
  std::string_view name;   ///< "dflash2", "mtp"
  bool taps = false;       ///< reads ForwardOut::taps; the model must be loaded with the drafter's tap layers
  int max_drafts = 0;      ///< most drafts of one sequence and call
  int context_window = 0;  ///< most committed positions that a draft can read; 0 = all of them
  bool chained = false;    ///< it passes once for each draft, else once for all of a sequence
};

/// One sequence that wants drafts. `table` holds at least the blocks of positions 0 … position + drafts − 1 (those of
/// the verification that follows); only a drafter whose cache lies beside the target's blocks reads it.
struct DraftRequest {
  SlotId slot = SlotId::none;
  int32_t anchor = 0;    ///< x_n
  int32_t position = 0;  ///< n
  int drafts = 0;        ///< how many, at most DraftTraits::max_drafts
  std::span<const BlockId> table{};
};

/// Drafts of one sequence, in order; fewer than asked for, down to none, where the context that they need was never
/// computed (after invalidate()).
struct Draft {
  std::vector<int32_t> tokens;
  /// Of each token: its softmax share among the best candidates of its position, given the drafts before it. In (0, 1].
  std::vector<float> confidence;
};

/// A drafter's memory has the target's slots, snapshots and blocks, by the same ids, so the scheduler's decisions hold
/// for both. All calls throw Error(internal) for ids outside the pools and requests beyond the traits.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual DraftTraits traits() const = 0;
  /// Bytes of weights on this rank, by group name, for the memory ledger.
  virtual std::vector<std::pair<std::string, size_t>> weight_bytes() const = 0;
  /// Bytes that this drafter wants for each block, slot and snapshot of the target, for the ledger.
  virtual PoolUnit pool_unit() const = 0;
  /// Allocates them. Once, before any call below; throws Error(memory).
  virtual void make_pools(const PoolSizes& sizes) = 0;

  /// After a target pass over `batch`, prompts and steps without drafts too: its rows become draft context. Each
  /// sequence must go on where the last call for its slot ended, or before (rows that were rejected, or a replay); a
  /// sequence that begins behind that has lost the context in between (as after invalidate()). Exports of the batch
  /// (export_pos, export_snap) are saved here. Sequences of slot −1 and padding are ignored. The batch's tensors must
  /// be readable by the host.
  virtual void observe(const Batch& batch, const ForwardOut& out) = 0;
  /// Drafts for many sequences in one go, each in its own slot; `drafts` has one place a request. A sequence's drafts
  /// have the same bits alone and among others. Blocks until they are on the host.
  virtual void propose(std::span<const DraftRequest> requests, std::span<Draft> drafts) = 0;

  /// A sequence starts from nothing in this slot.
  virtual void reset(SlotId slot) = 0;
  /// Keeps the context of positions 0 … position−1 of a slot with a snapshot of the target's state at that position;
  /// what lies behind is not kept.
  virtual void save(SlotId slot, int32_t position, SnapId snap) = 0;
  /// A sequence goes on at `position` in this slot with a snapshot's context. Where the snapshot holds none for that
  /// position (never saved, or forgotten), the same as invalidate().
  virtual void restore(SnapId snap, SlotId slot, int32_t position) = 0;
  /// What a snapshot id held is no longer true: the target's bytes under it come from elsewhere (a spill file).
  virtual void forget(SnapId snap) = 0;
  /// A sequence goes on at `position` in this slot without draft context: nothing before it will be read. Also right
  /// when the target's blocks came from elsewhere than this rank's passes.
  virtual void invalidate(SlotId slot, int32_t position) = 0;
  /// The target copies a block (a shared one that a sequence is about to write).
  virtual void copy_block(BlockId from, BlockId to) = 0;
  /// Intermediate values for golden tests, as Model::set_probe; names in each drafter's README section.
  virtual void set_probe(Probe probe) = 0;

 protected:
  Drafter() = default;
  Drafter(const Drafter&) = default;
  Drafter& operator=(const Drafter&) = default;
};

}  // namespace glm53
