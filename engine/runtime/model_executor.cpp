#include "engine/runtime/model_executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "common/error.h"
#include "common/strings.h"
#include "engine/runtime/verification.h"

namespace glm53 {
namespace {

[[noreturn]] void contradiction(const SeqStep& s, const std::string& what) {
  throw Error(Code::internal,
              cat("plan for slot ", static_cast<int32_t>(s.slot), " at position ", s.start, ": ", what));
}

Tensor vector_of(std::vector<int32_t>& v, int n) {
  return Tensor::of(v.data(), Dtype::i32, {n});
}

double ms_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
}

double weights_of(const Drafter* drafter) {
  double bytes = 0;
  if (drafter != nullptr)
    for (const auto& [group, size] : drafter->weight_bytes()) bytes += static_cast<double>(size);
  return bytes;
}

int32_t outermost(const Tensor& t) {
  return t.empty() ? 0 : static_cast<int32_t>(t.dim(0));
}

}  // namespace

ModelExecutor::ModelExecutor(Model& model, const Caches& caches, Ops& ops, SamplingTable* sampling, SpillTier* spill,
                             Drafter* drafter)
    : model_(model),
      caches_(caches),
      ops_(ops),
      sampling_(sampling),
      spill_(spill),
      drafter_(drafter),
      reads_(model),
      draft_bytes_(weights_of(drafter)),
      max_blocks_((model.limits().max_context + kBlockTokens - 1) / kBlockTokens),
      blocks_(outermost(caches.blocks)),
      snaps_(std::max(outermost(caches.snap_state), outermost(caches.snap_ring))),
      slots_(static_cast<size_t>(std::max(outermost(caches.state), outermost(caches.ring)))) {
  for (Group* group : {&step_, &piece_}) {
    const ModelLimits& l = model.limits();
    Staging& m = group->staging;
    const auto rows = static_cast<size_t>(l.max_rows), seqs = static_cast<size_t>(l.max_seqs);
    for (auto* v : {&m.token, &m.position, &m.row_seq}) v->resize(rows);
    for (auto* v : {&m.slot, &m.committed, &m.replay}) v->resize(seqs);
    for (auto* v : {&m.export_pos, &m.export_snap}) v->resize(2 * seqs);
    m.row_begin.resize(seqs + 1);
    m.block_table.resize(seqs * static_cast<size_t>(max_blocks_));
    m.logit_row.resize(static_cast<size_t>(l.max_logit_rows));
  }
}

ModelExecutor::SlotState& ModelExecutor::slot_state(SlotId slot) {
  const auto i = static_cast<size_t>(static_cast<int32_t>(slot));
  if (i >= slots_.size())
    throw Error(Code::internal, cat("plan names slot ", static_cast<int32_t>(slot), " of ", slots_.size()));
  return slots_[i];
}

void ModelExecutor::submit(const StepPlan& plan) {
  const auto begun = std::chrono::steady_clock::now();
  if (spill_ != nullptr)
    for (const SnapId snap : spill_->run(plan))
      if (drafter_ != nullptr) drafter_->forget(snap);
  flush(plan);
  save(plan);
  for (const SlotId slot : plan.release) release(slot);
  for (const SeqStep& s : plan.seqs) prepare(s);
  StepResult result;
  result.step = plan.step;
  result.stages.add(Stage::move, ms_since(begun));
  propose(plan, result);
  begin(plan);
  if (!step_.members.empty()) pass(step_, std::nullopt, result);
  if (plan.piece.last > 0) pass(piece_, plan.piece, result);
  for (size_t i = 0; i < plan.seqs.size(); ++i) advance(plan.seqs[i], proposed_[i].tokens);
  result.device_ms = ms_since(begun);
  results_.push_back(std::move(result));
}

std::optional<StepResult> ModelExecutor::poll() {
  if (results_.empty()) return std::nullopt;
  StepResult result = std::move(results_.front());
  results_.pop_front();
  return result;
}

void ModelExecutor::flush(const StepPlan& plan) {
  if (plan.flush.empty()) return;
  std::vector<SlotId> slots;
  std::vector<int> replay;
  for (const auto& [slot, records] : plan.flush) {
    SlotState& state = slot_state(slot);
    if (records < 0 || records > state.pending)
      throw Error(Code::internal, cat("plan flushes ", records, " records of ", state.pending));
    slots.push_back(slot);
    replay.push_back(records);
    state.committed += records;
    state.pending = 0;
  }
  model_.flush(slots, replay, caches_);
}

void ModelExecutor::save(const StepPlan& plan) {
  for (const auto& [slot, snap] : plan.save) {
    if (slot_state(slot).pending != 0 || static_cast<int32_t>(snap) < 0 || static_cast<int32_t>(snap) >= snaps_)
      throw Error(Code::internal, cat("plan saves slot ", static_cast<int32_t>(slot), " with ",
                                      slot_state(slot).pending, " records as snapshot ", static_cast<int32_t>(snap)));
    ops_.snapshot_save(caches_, slot, snap);
    if (drafter_ != nullptr) drafter_->save(slot, slot_state(slot).committed, snap);
  }
}

/// The sequence of a slot has ended; on its way through the layers it goes on as padding.
void ModelExecutor::release(SlotId slot) {
  slot_state(slot) = {};
  for (size_t i = 0; i < piece_.members.size(); ++i) {
    if (piece_.members[i].slot != slot) continue;
    piece_.members[i].slot = SlotId::none;
    piece_.staging.slot[i] = static_cast<int32_t>(SlotId::none);
  }
}

/// Slot, snapshot and block table as the step expects them.
void ModelExecutor::prepare(const SeqStep& s) {
  SlotState& state = slot_state(s.slot);
  if (s.restore != SnapId::none) {
    if (static_cast<int32_t>(s.restore) < 0 || static_cast<int32_t>(s.restore) >= snaps_)
      contradiction(s, "snapshot is not of the pool");
    ops_.snapshot_restore(caches_, s.restore, s.slot);
    if (drafter_ != nullptr) drafter_->restore(s.restore, s.slot, s.start);
    state = {.table = {}, .committed = s.start, .pending = 0};
  } else if (s.start == 0) {
    ops_.slot_reset(caches_, s.slot);
    if (drafter_ != nullptr) drafter_->reset(s.slot);
    state = {};
  }
  const auto in_pool = [&](BlockId b) { return static_cast<int32_t>(b) > 0 && static_cast<int32_t>(b) < blocks_; };
  for (const auto& [from, to] : s.copy) {
    if (!in_pool(from) || !in_pool(to)) contradiction(s, "copies a block that is not of the pool");
    ops_.block_copy(caches_, from, to);
    if (drafter_ != nullptr) drafter_->copy_block(from, to);
  }
  for (const BlockId b : s.append) {
    if (!in_pool(b)) contradiction(s, cat("block ", static_cast<int32_t>(b), " is not of the pool"));
    state.table.push_back(b);
  }
  check(s, state);
}

void ModelExecutor::check(const SeqStep& s, const SlotState& state) const {
  const auto known = static_cast<int64_t>(s.tokens.size()) - s.drafts, rows = known + s.drafts + s.propose;
  if (s.tokens.empty()) contradiction(s, "tokens that are still on the device are not supported by this executor");
  if (s.drafts < 0 || s.propose < 0 || known < 1 || (s.drafts > 0 && s.propose > 0))
    contradiction(s, cat(s.drafts, " of ", s.tokens.size(), " tokens are drafts, and ", s.propose, " more are wanted"));
  const int drafts = s.drafts + s.propose;
  const int most = drafter_ != nullptr ? drafter_->traits().max_drafts : 0;
  if (s.propose > most) contradiction(s, cat("wants ", s.propose, " drafts of a drafter that gives ", most));
  if (drafts > 0 ? s.logits != 1 + drafts || s.regime != Regime::window : s.logits < 0 || s.logits > 1)
    contradiction(s, cat("asks for logits of ", s.logits, " rows with ", drafts, " drafts"));
  if (s.replay < 0 || s.replay > state.pending)
    contradiction(s, cat("commits ", s.replay, " records of ", state.pending));
  if (state.committed + s.replay != s.start)
    contradiction(s, cat("follows ", state.committed, " committed and ", s.replay, " replayed tokens"));
  if (s.regime == Regime::window && rows > model_.limits().max_window)
    contradiction(s, cat("a window of ", rows, " rows"));
  if (s.regime == Regime::chunk && (s.replay != 0 || s.start % kChunk != 0))
    contradiction(s, "a prompt piece must start on the grid of 64 with nothing to replay");
  if (s.start + rows > model_.limits().max_context)
    contradiction(s, cat("ends behind the context of ", model_.limits().max_context));
  if (static_cast<int64_t>(state.table.size()) * kBlockTokens < s.start + rows)
    contradiction(s, cat("has only ", state.table.size(), " blocks"));
  if (static_cast<int64_t>(state.table.size()) > max_blocks_)
    contradiction(s, cat("has ", state.table.size(), " blocks, at most ", max_blocks_));
  if (s.exports.size() > 2) contradiction(s, "exports more than two snapshots");
}

void ModelExecutor::check_piece(const StepPlan& plan) const {
  const LayerSpan& span = plan.piece;
  if (span == LayerSpan{}) return;
  const auto wrong = [&](const std::string& what) {
    throw Error(Code::internal, cat("plan takes a piece through layers ", span.first, " to ", span.last, ": ", what));
  };
  const int layers = model_.config().layers;
  const bool chunks = !plan.seqs.empty() && plan.seqs.back().regime == Regime::chunk;
  const bool held =
      std::any_of(piece_.members.begin(), piece_.members.end(), [](const Member& m) { return m.slot != SlotId::none; });
  if (span.first < 0 || span.last <= span.first || span.last > layers) wrong(cat("the model has ", layers));
  if (span.first == 0 && !chunks) wrong("it has no sequences");
  if (span.first == 0 && held) wrong(cat("another one stands in front of layer ", held_));
  if (span.first > 0 && (chunks || !held || span.first != held_)) wrong(cat("it stands in front of layer ", held_));
}

/// The drafts that the plan leaves to the drafter: equal on every rank, and maybe fewer than the plan has room for.
void ModelExecutor::propose(const StepPlan& plan, StepResult& result) {
  proposed_.assign(plan.seqs.size(), {});
  std::vector<DraftRequest> requests;
  std::vector<size_t> whose;
  for (size_t i = 0; i < plan.seqs.size(); ++i) {
    const SeqStep& s = plan.seqs[i];
    if (s.propose == 0) continue;
    requests.push_back({.slot = s.slot,
                        .anchor = s.tokens.back(),
                        .position = s.start + static_cast<int32_t>(s.tokens.size()) - 1,
                        .drafts = s.propose,
                        .table = slot_state(s.slot).table});
    whose.push_back(i);
  }
  if (requests.empty()) return;
  const auto begun = std::chrono::steady_clock::now();
  std::vector<Draft> drafts(requests.size());
  drafter_->propose(requests, drafts);
  for (size_t i = 0; i < whose.size(); ++i) {
    if (drafts[i].tokens.size() > static_cast<size_t>(requests[i].drafts))
      throw Error(Code::internal, cat("the drafter gave ", drafts[i].tokens.size(), " drafts of ", requests[i].drafts));
    proposed_[whose[i]] = std::move(drafts[i]);
  }
  result.draft_ms = ms_since(begun);
  const int passes = drafter_->traits().chained ? std::ranges::max(requests, {}, &DraftRequest::drafts).drafts : 1;
  result.stages.add(Stage::draft, result.draft_ms, passes * draft_bytes_);
}

/// The groups of a step.
void ModelExecutor::begin(const StepPlan& plan) {
  check_piece(plan);
  const auto clear = [](Group& group) {
    group.members.clear();
    group.batch = {};
    group.staging.row_begin[0] = 0;
  };
  clear(step_);
  const bool begins = plan.piece.last > 0 && plan.piece.first == 0;
  if (begins) clear(piece_);
  for (size_t i = 0; i < plan.seqs.size(); ++i)
    stage(plan.seqs[i], proposed_[i].tokens, begins && plan.seqs[i].regime == Regime::chunk ? piece_ : step_);
  close(step_);
  if (begins) close(piece_);
  held_ = plan.piece.last > 0 ? plan.piece.last % model_.config().layers : held_;
}

void ModelExecutor::stage(const SeqStep& s, std::span<const int32_t> proposed, Group& group) {
  const SlotState& state = slot_state(s.slot);
  Staging& m = group.staging;
  Batch& batch = group.batch;
  const auto seq = static_cast<size_t>(batch.seqs);
  const auto rows = static_cast<int>(s.tokens.size() + proposed.size());
  if (static_cast<size_t>(batch.rows + rows) > m.token.size() || seq >= m.slot.size())
    throw Error(Code::internal, cat("plan of more than ", m.token.size(), " rows or ", m.slot.size(), " sequences"));
  if (s.regime == Regime::window && batch.window_seqs != batch.seqs) contradiction(s, "window sequences come first");
  for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
    const auto row = static_cast<size_t>(batch.rows) + i;
    m.token[row] = i < s.tokens.size() ? s.tokens[i] : proposed[i - s.tokens.size()];
    m.position[row] = s.start + static_cast<int32_t>(i);
    m.row_seq[row] = batch.seqs;
  }
  m.slot[seq] = static_cast<int32_t>(s.slot);
  m.committed[seq] = state.committed;
  m.replay[seq] = s.replay;
  int32_t* table = m.block_table.data() + seq * static_cast<size_t>(max_blocks_);
  std::fill_n(table, max_blocks_, static_cast<int32_t>(BlockId::null));
  std::transform(state.table.begin(), state.table.end(), table, [](BlockId b) { return static_cast<int32_t>(b); });
  for (size_t e = 0; e < 2; ++e) {
    const bool wanted = e < s.exports.size();
    m.export_pos[2 * seq + e] = wanted ? s.exports[e].first : -1;
    m.export_snap[2 * seq + e] = static_cast<int32_t>(wanted ? s.exports[e].second : SnapId::none);
    if (wanted && (m.export_snap[2 * seq + e] < 0 || m.export_snap[2 * seq + e] >= snaps_))
      contradiction(s, "exports to a snapshot that is not of the pool");
  }
  batch.rows += rows;
  batch.seqs += 1;
  if (s.regime == Regime::window) {
    batch.window_rows += rows;
    batch.window_seqs += 1;
  }
  m.row_begin[seq + 1] = batch.rows;
  const auto logits = static_cast<int16_t>(s.propose > 0 ? 1 + proposed.size() : static_cast<size_t>(s.logits));
  group.members.push_back({.request = s.request, .slot = s.slot, .logits = logits, .end = batch.rows});
}

void ModelExecutor::close(Group& group) const {
  Staging& m = group.staging;
  Batch& batch = group.batch;
  batch.token = vector_of(m.token, batch.rows);
  batch.position = vector_of(m.position, batch.rows);
  batch.row_seq = vector_of(m.row_seq, batch.rows);
  batch.row_begin = vector_of(m.row_begin, batch.seqs + 1);
  batch.slot = vector_of(m.slot, batch.seqs);
  batch.committed = vector_of(m.committed, batch.seqs);
  batch.replay = vector_of(m.replay, batch.seqs);
  batch.block_table = Tensor::of(m.block_table.data(), Dtype::i32, {batch.seqs, max_blocks_});
  batch.export_pos = Tensor::of(m.export_pos.data(), Dtype::i32, {batch.seqs, 2});
  batch.export_snap = Tensor::of(m.export_snap.data(), Dtype::i32, {batch.seqs, 2});
}

/// The rows whose logits somebody still waits for.
void ModelExecutor::want_logits(Group& group) const {
  Staging& m = group.staging;
  Batch& batch = group.batch;
  batch.logit_rows = 0;
  for (const Member& member : group.members) {
    if (member.slot == SlotId::none) continue;
    for (int32_t row = member.end - member.logits; row < member.end; ++row) {
      if (static_cast<size_t>(batch.logit_rows) >= m.logit_row.size())
        throw Error(Code::internal, cat("plan wants logits of more than ", m.logit_row.size(), " rows"));
      m.logit_row[static_cast<size_t>(batch.logit_rows++)] = row;
    }
  }
  batch.logit_row = vector_of(m.logit_row, batch.logit_rows);
}

/// Through all layers, or those of a part; what comes out at the end is sampled.
void ModelExecutor::pass(Group& group, std::optional<LayerSpan> layers, StepResult& result) {
  want_logits(group);
  const int all = model_.config().layers;
  auto begun = std::chrono::steady_clock::now();
  const ForwardOut out =
      layers ? model_.forward_part(group.batch, caches_, *layers) : model_.forward(group.batch, caches_);
  // Here and not with the sampling's result, so that each has its own time.
  ops_.synchronize();
  const bool last = !layers || layers->last == all;
  const double share = layers ? static_cast<double>(layers->last - layers->first) / all : 1;
  result.stages.add(Stage::forward, ms_since(begun),
                    reads_.bytes(group.batch.rows, last ? group.batch.logit_rows : 0, share));
  begun = std::chrono::steady_clock::now();
  if (drafter_ != nullptr && last) {
    drafter_->observe(group.batch, out);
    result.stages.add(Stage::observe, ms_since(begun));
    begun = std::chrono::steady_clock::now();
  }
  if (sampling_ != nullptr && last && group.batch.logit_rows > 0) {
    sample(group, out.logits, result);
    result.stages.add(Stage::sample, ms_since(begun));
  } else {
    ops_.synchronize();
  }
  if (layers && last) group.members.clear();
}

void ModelExecutor::advance(const SeqStep& s, std::span<const int32_t> proposed) {
  SlotState& state = slot_state(s.slot);
  const auto rows = static_cast<int32_t>(s.tokens.size() + proposed.size());
  state.committed = s.regime == Regime::window ? s.start : s.start + rows;
  state.pending = s.regime == Regime::window ? rows : 0;
}

namespace {

[[noreturn]] void no_numbers(uint64_t request) {
  throw Error(
      Code::internal, cat("the logits of request ", request, " are not numbers"),
      "the request is tried once more after a restart; when that fails too, look at the weights and the device");
}

}  // namespace

/// A rank that computes nonsense must not go on. Logits on a device are not looked at here; see sample().
void ModelExecutor::require_numbers(std::span<const uint64_t> requests, Tensor logits) const {
  if (logits.place == Place::device) return;
  const int64_t vocab = sampling_->space().text_vocab;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto* row = static_cast<const float*>(logits.data) + static_cast<int64_t>(i) * logits.stride[0];
    if (std::any_of(row, row + vocab, [](float z) { return std::isnan(z); })) no_numbers(requests[i]);
  }
}

/// Drafts of a sequence: the tokens behind the first of its rows with logits.
std::span<const int32_t> ModelExecutor::drafts_of(const Group& group, const Member& m) {
  return std::span(group.staging.token)
      .subspan(static_cast<size_t>(m.end - m.logits + 1), static_cast<size_t>(m.logits - 1));
}

void ModelExecutor::sample(const Group& group, Tensor logits, StepResult& result) {
  std::vector<SampleRow> rows;
  std::vector<uint64_t> requests;  // of the rows
  for (const Member& m : group.members) {
    if (m.logits == 0 || m.slot == SlotId::none) continue;
    if (SamplingState* state = sampling_->find(m.request)) {
      const std::span<const SampleRow> own = state->rows(drafts_of(group, m));
      rows.insert(rows.end(), own.begin(), own.end());
    }
    requests.insert(requests.end(), static_cast<size_t>(m.logits), m.request);
    // Behind a draft that cannot come true nobody asks.
    rows.resize(requests.size(), SampleRow{.temperature = 0});
  }
  require_numbers(requests, logits);
  std::vector<SampleOut> out(rows.size());
  ops_.sample({logits, sampling_->space().text_vocab, rows, out});
  size_t first = 0;
  for (const Member& m : group.members) {
    if (m.logits == 0 || m.slot == SlotId::none) continue;
    const auto count = static_cast<size_t>(m.logits);
    for (size_t i = first; i < first + count; ++i)
      // Nothing to choose although nothing was forbidden.
      if (out[i].token < 0 && rows[i].allowed.empty() && rows[i].bias.empty() && rows[i].banned.empty())
        no_numbers(m.request);
    result.seqs.push_back(
        sample_and_match(drafts_of(group, m), std::span(out).subspan(first, count), sampling_->find(m.request)));
    result.seqs.back().request = m.request;
    first += count;
  }
}

}  // namespace glm53
