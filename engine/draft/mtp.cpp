// The MTP layer at work: its rows are written behind the target's passes, as soon as the token behind each is known,
// and a chain of drafts starts at the last one (spec speculative §2.3).
#include <algorithm>
#include <optional>

#include "common/error.h"
#include "common/strings.h"
#include "engine/draft/mtp_batch.h"
#include "engine/draft/mtp_layer.h"
#include "engine/draft/observed.h"
#include "engine/draft/target_head.h"
#include "engine/loader/source.h"

namespace glm53 {
namespace {

constexpr int kCandidates = 16;  // whose softmax share is the confidence of a draft

/// Where the layer's rows begin to count for a sequence without anything before `position`: on a block's border, since
/// rows lie in the target's blocks.
int32_t base_of(int32_t position) {
  return (position + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

/// What is known of a slot. Rows [base, done) are in the caches; of the positions from `done` on, hidden states are
/// kept until the tokens behind them are known.
struct MtpSlot {
  int32_t base = 0, done = 0;
  std::vector<int32_t> pending{};  ///< tokens of those positions
  int32_t tried = -1;              ///< token with which propose() wrote row `done` already
  std::vector<BlockId> table{};    ///< of the last pass

  int32_t end() const { return done + static_cast<int32_t>(pending.size()); }
  void begin_at(int32_t position) { *this = {base_of(position), position, {}, -1, std::move(table)}; }
  /// Forgets what lies at or behind a position: rows of a window that were rejected.
  void trim(int32_t position) {
    if (position >= end()) return;
    pending.resize(static_cast<size_t>(std::max(position - done, 0)));
    if (position <= done) tried = -1;
    done = std::min(done, position);
  }
};
struct MtpSnap {
  bool valid = false;
  int32_t base = 0, position = 0;
};

/// How many of the next `n` rows are not written: those in front of the base, and `there` that are written already.
int32_t skip_of(const MtpSlot& state, int32_t there, int32_t n) {
  return std::min(std::max(state.base - state.done, there), n);
}

class MtpDrafter final : public Drafter {
 public:
  MtpDrafter(const std::string& dir, const FormatPolicy& policy, const MtpOptions& options, Model& target, Ops& ops,
             Communicator& comm)
      : options_(options),
        target_(target),
        ops_(ops),
        rows_(target.limits().max_rows + target.limits().max_seqs * target.limits().max_window) {
    check();
    source_ = open_checkpoint(dir, policy, comm.shard(), ops);
    const std::string layer = cat("model.language_model.layers.", target.config().layers, ".");
    layer_.emplace(WeightReader(*source_, ledger_, layer), target, rows_, ops, comm);
    const int64_t seqs = target.limits().max_seqs;
    head_.emplace(target.shared(), ops, comm, seqs, kCandidates);
    batches_.emplace(target.limits(), rows_, ops);
    value_host_ = store_.take(Dtype::f32, {seqs, kCandidates}, Place::pinned);
    id_host_ = store_.take(Dtype::i32, {seqs, kCandidates}, Place::pinned);
  }

  DraftTraits traits() const override { return {"mtp", false, options_.max_drafts, 0, true}; }
  std::vector<std::pair<std::string, size_t>> weight_bytes() const override { return ledger_.lines(); }
  void set_probe(Probe probe) override { probe_ = std::move(probe); }

  PoolUnit pool_unit() const override {
    PoolUnit unit = glm53::pool_unit(geometry(), ops_.activation());
    const size_t row = static_cast<size_t>(target_.config().hidden) * size_of(ops_.activation());
    unit.slot += row * static_cast<size_t>(target_.limits().max_window);
    unit.snap += row;
    return unit;
  }
  void make_pools(const PoolSizes& sizes) override {
    caches_ = make_caches(geometry(), sizes, ops_);
    const int64_t h = target_.config().hidden;
    pending_ = store_.take(ops_.activation(), {sizes.slots, target_.limits().max_window, h});
    if (sizes.snaps > 0) saved_ = store_.take(ops_.activation(), {sizes.snaps, h});
    slots_.resize(static_cast<size_t>(sizes.slots));
    snaps_.resize(static_cast<size_t>(sizes.snaps));
  }

  void observe(const Batch& batch, const ForwardOut& out) override;
  void propose(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;

  void reset(SlotId slot) override { of(slot).begin_at(0); }
  void invalidate(SlotId slot, int32_t position) override { of(slot).begin_at(position); }
  void forget(SnapId snap) override { of(snap) = {}; }
  void copy_block(BlockId from, BlockId to) override { ops_.block_copy(caches_.caches, from, to); }
  void save(SlotId slot, int32_t position, SnapId snap) override;
  void restore(SnapId snap, SlotId slot, int32_t position) override;

 private:
  void check() const;
  CacheGeometry geometry() const {
    CacheGeometry g = target_.geometry();
    g.mla_layers = 1;
    g.kda_layers = 0;
    return g;
  }
  MtpSlot& of(SlotId slot) { return at(slots_, static_cast<int32_t>(slot), "slot"); }
  MtpSnap& of(SnapId snap) { return at(snaps_, static_cast<int32_t>(snap), "snapshot"); }
  template <class T>
  static T& at(std::vector<T>& all, int32_t i, std::string_view what) {
    if (i < 0 || static_cast<size_t>(i) >= all.size())
      throw Error(Code::internal, cat("mtp: ", what, " ", i, " of ", all.size()));
    return all[static_cast<size_t>(i)];
  }
  Tensor pending(SlotId slot, int32_t first, int32_t n) const {
    return pending_[static_cast<int32_t>(slot)].rows(first, first + n);
  }
  Tensor saved(SnapId snap) const { return saved_.rows(static_cast<int32_t>(snap), static_cast<int32_t>(snap) + 1); }

  /// Hidden states of a pass as the layer wants them.
  const Tensor& hidden_of(const ForwardOut& out) const { return options_.post_norm ? out.hidden : out.mean; }
  void observe_piece(const ObservedPiece& piece, const Batch& batch, const Tensor& hidden);
  void save_exports(const ObservedPiece& piece, const MtpSlot& state, const Tensor& hidden, MtpRows& rows);
  void keep(const ObservedPiece& piece, const Batch& batch, const Tensor& hidden);
  /// Adds rows to the next write(). Their hidden states are those kept for the slot, then those of a pass from `row`
  /// on, without the first `skip` of all.
  void add(MtpRows rows, int32_t skip, const Tensor& hidden, int32_t row);
  void write();
  /// Of the kept rows of a slot adds all but the last to the next write(); then, behind that, forgets them.
  void add_kept(SlotId slot, std::span<const BlockId> table);
  void leave_last(SlotId slot);
  void chain(std::span<const DraftRequest> requests, std::span<Draft> drafts);
  void propose_some(std::span<const DraftRequest> requests, std::span<Draft> drafts);

  const MtpOptions options_;
  Model& target_;
  Ops& ops_;
  const int rows_;
  std::unique_ptr<WeightSource> source_;  // owns the memory of the weights
  WeightLedger ledger_;
  std::optional<MtpLayer> layer_;
  std::optional<TargetHead> head_;
  std::optional<MtpBatches> batches_;
  TensorStore store_{ops_};
  OwnedCaches caches_;
  Tensor pending_, saved_;       // act [slots][window][H], [snaps][H]: hidden states without a next token yet
  Tensor value_host_, id_host_;  // candidates of a draft
  std::vector<MtpSlot> slots_;
  std::vector<MtpSnap> snaps_;
  std::vector<MtpRows> writes_;  // of the next write(); their hidden states are in the layer
  int32_t write_rows_ = 0;
  std::vector<std::pair<SlotId, SnapId>> ring_saves_;  // exports of pieces that write no row
  Probe probe_;
};

void MtpDrafter::check() const {
  const ModelConfig& c = target_.config();
  if (c.mtp_layers < 1)
    throw Error(Code::config, "this checkpoint has no MTP layer (num_nextn_predict_layers is 0)",
                "choose another drafter, or none");
  const int most = target_.limits().max_window - 1;
  if (options_.max_drafts < 1 || options_.max_drafts > most)
    throw Error(Code::config, cat("a chain of ", options_.max_drafts, " MTP drafts"), cat("1 to ", most));
}

void MtpDrafter::add(MtpRows rows, int32_t skip, const Tensor& hidden, int32_t row) {
  const auto n = static_cast<int32_t>(rows.next.size());
  if (n == 0) return;
  const auto kept = static_cast<int32_t>(of(rows.slot).pending.size());
  const int32_t from_kept = std::min(std::max(kept - skip, 0), n), own = n - from_kept;
  if (from_kept > 0) ops_.copy(layer_->hidden(write_rows_, from_kept), pending(rows.slot, skip, from_kept));
  if (own > 0) {
    const int32_t first = row + std::max(skip - kept, 0);
    ops_.copy(layer_->hidden(write_rows_ + from_kept, own), hidden.rows(first, first + own));
  }
  write_rows_ += n;
  writes_.push_back(std::move(rows));
}

void MtpDrafter::write() {
  if (!writes_.empty()) {
    layer_->write(batches_->fill(writes_, options_.zero_first), caches_.caches);
    batches_->end();
  }
  for (const auto& [slot, snap] : ring_saves_) ops_.snapshot_save(caches_.caches, slot, snap);
  writes_.clear();
  ring_saves_.clear();
  write_rows_ = 0;
}

/// Rows whose next token this pass brings: those kept from before, and in the chunk regime all of its own but the last.
void MtpDrafter::observe_piece(const ObservedPiece& piece, const Batch& batch, const Tensor& hidden) {
  MtpSlot& state = of(piece.slot);
  const auto* table = batch.block_table.as<const int32_t>() + piece.seq * batch.block_table.dim(1);
  state.table.clear();
  for (int64_t b = 0; b < batch.block_table.dim(1) && b * kBlockTokens < piece.end; ++b)
    state.table.push_back(BlockId{table[b]});
  state.trim(piece.position);
  if (state.end() != piece.position) state.begin_at(piece.position);

  const auto* token = batch.token.as<const int32_t>() + piece.row;
  MtpRows rows{
      .slot = piece.slot, .window = piece.window, .base = state.base, .position = state.done, .table = state.table};
  if (!state.pending.empty()) {
    rows.next.assign(state.pending.begin() + 1, state.pending.end());
    rows.next.push_back(token[0]);
  }
  const int32_t own = piece.window ? 0 : piece.end - piece.position - 1;
  rows.next.insert(rows.next.end(), token + 1, token + 1 + own);
  const bool there = state.pending.size() == 1 && state.tried == token[0];  // propose() wrote it
  const int32_t skip = skip_of(state, there ? 1 : 0, static_cast<int32_t>(rows.next.size()));
  rows.next.erase(rows.next.begin(), rows.next.begin() + skip);
  rows.position += skip;
  if (!piece.exports.empty()) save_exports(piece, state, hidden, rows);
  add(std::move(rows), skip, hidden, piece.row);
}

/// A snapshot at p holds the ring without row p − 1, or with it (it is written anew then), and the hidden state of
/// p − 1, to go on with whatever token follows.
void MtpDrafter::save_exports(const ObservedPiece& piece, const MtpSlot& state, const Tensor& hidden, MtpRows& rows) {
  const int32_t written = rows.position + static_cast<int32_t>(rows.next.size());
  for (const auto& [position, snap] : piece.exports) {
    const bool before = position == piece.position;  // its row is one of those kept
    MtpSnap& s = of(snap);
    s = {position > state.base && (!before || !state.pending.empty()), state.base, position};
    if (!s.valid) continue;
    const int32_t row = piece.row + position - 1 - piece.position;
    ops_.copy(saved(snap), before ? pending(piece.slot, static_cast<int32_t>(state.pending.size()) - 1, 1)
                                  : hidden.rows(row, row + 1));
    if (rows.next.empty()) {
      ring_saves_.emplace_back(piece.slot, snap);
    } else {
      rows.exports.emplace_back(std::clamp(position, rows.position, written), snap);
    }
  }
}

/// Hidden states whose next token is not known yet: of a window all (which were accepted shows later), of a piece of a
/// prompt the last.
void MtpDrafter::keep(const ObservedPiece& piece, const Batch& batch, const Tensor& hidden) {
  MtpSlot& state = of(piece.slot);
  const int32_t n = piece.end - piece.position, kept = piece.window ? n : 1;
  if (kept > target_.limits().max_window) throw Error(Code::internal, cat("mtp: a window of ", kept, " rows"));
  const auto* token = batch.token.as<const int32_t>() + piece.row;
  state.done = piece.end - kept;
  state.tried = -1;
  state.pending.assign(token + n - kept, token + n);
  ops_.copy(pending(piece.slot, 0, kept), hidden.rows(piece.row + n - kept, piece.row + n));
}

void MtpDrafter::observe(const Batch& batch, const ForwardOut& out) {
  const Tensor& hidden = hidden_of(out);
  const std::vector<ObservedPiece> pieces = observed_pieces(batch);
  for (const ObservedPiece& piece : pieces) observe_piece(piece, batch, hidden);
  write();
  for (const ObservedPiece& piece : pieces) keep(piece, batch, hidden);
}

void MtpDrafter::add_kept(SlotId slot, std::span<const BlockId> table) {
  const MtpSlot& state = of(slot);
  if (state.pending.size() < 2) return;
  MtpRows rows{.slot = slot, .window = true, .base = state.base, .position = state.done, .table = table};
  rows.next.assign(state.pending.begin() + 1, state.pending.end());
  const int32_t skip = skip_of(state, 0, static_cast<int32_t>(rows.next.size()));
  rows.next.erase(rows.next.begin(), rows.next.begin() + skip);
  rows.position += skip;
  add(std::move(rows), skip, {}, 0);
}

void MtpDrafter::leave_last(SlotId slot) {
  MtpSlot& state = of(slot);
  const auto n = static_cast<int32_t>(state.pending.size());
  if (n < 2) return;
  ops_.copy(pending(slot, 0, 1), pending(slot, n - 1, 1));
  state.done += n - 1;
  state.pending = {state.pending.back()};
  state.tried = -1;
}

void MtpDrafter::save(SlotId slot, int32_t position, SnapId snap) {
  MtpSlot& state = of(slot);
  state.trim(position);
  of(snap) = {state.end() == position && !state.pending.empty() && position > state.base, state.base, position};
  if (!of(snap).valid) return;
  add_kept(slot, state.table);
  write();
  leave_last(slot);
  ops_.snapshot_save(caches_.caches, slot, snap);
  ops_.copy(saved(snap), pending(slot, 0, 1));
}

void MtpDrafter::restore(SnapId snap, SlotId slot, int32_t position) {
  MtpSlot& state = of(slot);
  state.begin_at(position);
  const MtpSnap& s = of(snap);
  if (!s.valid || s.position != position) return;
  constexpr int32_t kAnyToken = 0;  // the token of the only kept row is the next one of no row
  state.base = s.base;
  state.done = position - 1;
  state.pending = {kAnyToken};
  ops_.snapshot_restore(caches_.caches, snap, slot);
  ops_.copy(pending(slot, 0, 1), saved(snap));
}

void MtpDrafter::propose(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  check_requests(requests, drafts, options_.max_drafts);
  const auto most = static_cast<size_t>(target_.limits().max_seqs);
  for (size_t i = 0; i < requests.size(); i += most) {
    const size_t n = std::min(most, requests.size() - i);
    propose_some(requests.subspan(i, n), drafts.subspan(i, n));
  }
}

void MtpDrafter::propose_some(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  for (const DraftRequest& r : requests) {
    of(r.slot).trim(r.position);
    add_kept(r.slot, r.table);
  }
  write();
  for (const DraftRequest& r : requests) leave_last(r.slot);
  for (Draft& draft : drafts) draft = {};
  chain(requests, drafts);
}

/// Drafts one after another, all sequences at once: from the last committed row with the anchor behind it, then from
/// each draft's own row, whose place the next pass takes again.
void MtpDrafter::chain(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  std::vector<size_t> active;
  for (size_t i = 0; i < requests.size(); ++i) {
    const DraftRequest& r = requests[i];
    MtpSlot& state = of(r.slot);
    if (r.drafts == 0 || state.pending.empty() || state.end() != r.position || r.position - 1 < state.base) continue;
    ops_.copy(layer_->hidden(static_cast<int64_t>(active.size()), 1), pending(r.slot, 0, 1));
    state.tried = r.anchor;
    active.push_back(i);
  }
  for (int32_t step = 0; !active.empty(); ++step) {
    std::vector<MtpRows> rows;
    for (const size_t i : active) {
      const DraftRequest& r = requests[i];
      rows.push_back({.slot = r.slot,
                      .base = of(r.slot).base,
                      .position = r.position - 1 + step,
                      .next = {step == 0 ? r.anchor : drafts[i].tokens.back()},
                      .table = r.table});
    }
    const Tensor z = layer_->run(batches_->fill(rows, options_.zero_first), caches_.caches);
    batches_->end();
    const TargetHead::Best best = head_->best(z);
    if (probe_) {
      ops_.synchronize();
      probe_(cat("z", step + 1), z);
      probe_(cat("value", step + 1), best.value);
      probe_(cat("candidates", step + 1), best.id);
    }
    const auto n = static_cast<int64_t>(active.size());
    ops_.copy(value_host_.rows(0, n), best.value);
    ops_.copy(id_host_.rows(0, n), best.id);
    ops_.synchronize();
    std::vector<size_t> next;
    for (size_t at = 0; at < active.size(); ++at) {
      Draft& draft = drafts[active[at]];
      const int32_t token = id_host_.as<const int32_t>()[at * kCandidates];
      if (token < 0) continue;
      draft.tokens.push_back(token);
      draft.confidence.push_back(share_of_best({value_host_.as<const float>() + at * kCandidates, kCandidates}));
      if (static_cast<int32_t>(draft.tokens.size()) == requests[active[at]].drafts) continue;
      // The layer's input is memory of its own: z of the others is still needed.
      const auto row = static_cast<int64_t>(at);
      ops_.copy(layer_->hidden(static_cast<int64_t>(next.size()), 1), z.rows(row, row + 1));
      next.push_back(active[at]);
    }
    active = std::move(next);
  }
}

}  // namespace

std::unique_ptr<Drafter> make_mtp_drafter(const std::string& dir, const FormatPolicy& policy, const MtpOptions& options,
                                          Model& target, Ops& ops, Communicator& comm) {
  return std::make_unique<MtpDrafter>(dir, policy, options, target, ops, comm);
}

}  // namespace glm53
