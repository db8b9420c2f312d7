// What runs in a step. The policy stands in scheduler.cpp.
#include <algorithm>
#include <utility>

#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

constexpr Scheduler::Time kLongestGap{10000};  // between two plans, as the scheduler's own time sees it

}  // namespace

int32_t Scheduler::Sequence::token_at(int32_t position) const {
  return position < prompt() ? request.prompt[static_cast<size_t>(position)]
                             : output[static_cast<size_t>(position - prompt())];
}

/// The scheduler's own time follows the wall clock, but neither goes back nor leaps.
void Scheduler::pass_time(Time now) {
  if (wall_) now_ += std::clamp(now - *wall_, Time{0}, kLongestGap);
  wall_ = now;
}

std::optional<StepPlan> Scheduler::plan(Time now) {
  pass_time(now);
  expire(now);
  admit();
  reread();
  make_room_for_rows();
  // One that had its own copies of cached blocks may have stood in its own way; it comes back sharing them.
  if (running_.empty()) admit();
  StepPlan plan;
  Flight flight;
  plan_windows(plan, flight);
  plan_chunks(plan, flight);
  if (plan.seqs.empty() && plan.piece == LayerSpan{} && loads_.empty()) return std::nullopt;
  plan.generation = generation_;
  plan.step = ++step_;
  plan.flush = std::exchange(flushes_, {});
  plan.save = std::exchange(saves_, {});
  plan.release = std::exchange(released_, {});
  plan.spill = cache_.take_spills();
  plan.load = std::exchange(loads_, {});
  flight.step = plan.step;
  flight.parts = std::exchange(parts_, {});
  flights_.push_back(std::move(flight));
  return plan;
}

/// One row for every sequence that generates; more only for tokens that are known already, where rows are left beside a
/// prompt piece, and for drafts.
void Scheduler::plan_windows(StepPlan& plan, Flight& flight) {
  int32_t spare = limits_.max_rows - kChunk;
  for (const Sequence& s : running_)
    if (s.generates()) --spare;
  std::vector<std::pair<Sequence*, int32_t>> windows;
  for (Sequence& s : running_) {
    if (!s.generates()) continue;
    const int32_t ahead = s.total() - s.computed;
    int32_t most = std::min(ahead, limits_.max_window);
    // Its state is kept at multiples of 64.
    if (limits_.reuse_output == ReuseOutput::always) most = std::min(most, kChunk - s.computed % kChunk);
    const int32_t extra = std::clamp(most - 1, 0, std::max(spare, 0));
    spare -= extra;
    flight.window_rows += 1 + extra;
    windows.emplace_back(&s, 1 + extra);
  }
  choose_drafts(windows, spare, flight);
  for (const auto& [s, rows] : windows) plan.seqs.push_back(step_of(*s, Regime::window, rows));
}

void Scheduler::plan_chunks(StepPlan& plan, Flight& flight) {
  if (piece_) return go_on(plan, flight);
  const int32_t most = std::min(limits_.prefill_chunk, limits_.max_rows - flight.window_rows);
  const size_t first_part = parts_.size();
  flight.chunk_rows = plan_rows(plan, share_.rows(flight.window_rows, cost_, most));
  if (flight.chunk_rows == 0) return;
  // There may be less to read than was allowed.
  const int32_t layers = share_.layers(flight.window_rows, cost_, flight.chunk_rows, limits_.layers);
  flight.planned_ms = share_.cost_ms(cost_, flight.chunk_rows, layers);
  share_.planned(flight.planned_ms);
  if (layers < limits_.layers) hold(plan, flight, first_part, layers);
}

/// So many rows of prompts, those first whose last piece is longest ago.
int32_t Scheduler::plan_rows(StepPlan& plan, int32_t budget) {
  std::vector<Sequence*> readers;
  for (Sequence& s : running_)
    if (s.reads()) readers.push_back(&s);
  // Stable: equal ones in the order of admission.
  std::stable_sort(readers.begin(), readers.end(), [](const Sequence* a, const Sequence* b) {
    return a->last_piece != b->last_piece ? a->last_piece < b->last_piece : a->before(*b);
  });
  int32_t planned = 0;
  for (Sequence* s : readers) {
    const int32_t reach = s->computed + budget - planned;
    const int32_t end = reach >= s->prompt() ? s->prompt() : reach / kChunk * kChunk;
    if (end <= s->computed) continue;
    const int32_t rows = end - s->computed;
    planned += rows;
    if (!s->reread) prompt_tokens_ += static_cast<uint64_t>(rows);
    s->last_piece = step_ + 1;
    plan.seqs.push_back(step_of(*s, Regime::chunk, rows));
  }
  return planned;
}

/// The prompt rows of the plan stop in front of a layer. They have finished only behind the last one; what was restored
/// for them is there after this step.
void Scheduler::hold(StepPlan& plan, Flight& flight, size_t first_part, int32_t layers) {
  plan.piece = flight.piece = {0, layers};
  piece_ = Piece{.parts = {}, .rows = flight.chunk_rows, .layers = layers};
  for (size_t i = first_part; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    Sequence& s = *by_id_.at(part.request);
    s.held = true;
    Part restored{.request = part.request, .serial = part.serial, .restoring = part.restoring, .end = 0, .snaps = {}};
    restored.end = s.finished;
    part.restoring = prefix::LeaseId::none;
    piece_->parts.push_back(std::exchange(part, std::move(restored)));
  }
}

/// The piece that stands between two layers goes on.
void Scheduler::go_on(StepPlan& plan, Flight& flight) {
  const int32_t layers = share_.layers(flight.window_rows, cost_, piece_->rows, limits_.layers - piece_->layers);
  if (layers == 0) return;
  plan.piece = flight.piece = {piece_->layers, piece_->layers + layers};
  flight.chunk_rows = piece_->rows;
  flight.planned_ms = share_.cost_ms(cost_, piece_->rows, layers);
  share_.planned(flight.planned_ms);
  piece_->layers += layers;
  if (piece_->layers < limits_.layers) return;
  for (Part& part : piece_->parts) {
    if (const auto at = by_id_.find(part.request); at != by_id_.end() && at->second->serial == part.serial)
      at->second->held = false;
    parts_.push_back(std::move(part));
  }
  piece_.reset();
}

/// Nobody waits for the piece any more.
void Scheduler::drop_dead_piece() {
  if (!piece_) return;
  for (const Part& part : piece_->parts) {
    const auto at = by_id_.find(part.request);
    if (at != by_id_.end() && at->second->serial == part.serial) return;
  }
  for (const Part& part : piece_->parts) cache_.drop(part.snaps);
  piece_.reset();
}

/// What a step that has finished tells of the cost of rows.
void Scheduler::learn(const Flight& flight, const StepResult& result) {
  const double ms = result.device_ms;
  if (flight.drafter_passes > 0) drafter_cost_.observe(flight.drafter_passes, result.draft_ms);
  if (flight.chunk_rows == 0) window_cost_.observe(flight.window_rows, ms - result.draft_ms);
  const double window_ms = flight.chunk_rows == 0 ? ms : std::min(cost_.window_ms(flight.window_rows), ms);
  if (flight.piece == LayerSpan{}) {
    cost_.observe(flight.window_rows, flight.chunk_rows, ms);
  } else {
    if (flight.piece.first == 0) piece_ms_ = 0;
    piece_ms_ += ms - window_ms;
    if (flight.piece.last == limits_.layers) cost_.observe_piece(flight.chunk_rows, piece_ms_);
  }
  share_.ran(flight.planned_ms, flight.window_rows > 0 ? window_ms : 0, ms - window_ms);
}

SeqStep Scheduler::step_of(Sequence& s, Regime regime, int32_t rows) {
  SeqStep step;
  step.request = s.request.id;
  step.slot = s.slot;
  step.regime = regime;
  step.start = s.computed;
  step.replay = s.pending;
  for (int32_t i = 0; i < rows; ++i) step.tokens.push_back(s.token_at(s.computed + i));
  Part part;
  part.request = s.request.id;
  part.serial = s.serial;
  part.end = s.computed + rows;
  if (!s.started) {
    step.restore = s.cache.restore;
    if (s.cache.copy != BlockId::null) step.copy.emplace_back(s.cache.copy, s.cache.table.at(s.cache.copy_to));
    if (s.cache.restoring) part.restoring = s.cache.lease;
  }
  step.append.assign(s.cache.table.begin() + static_cast<std::ptrdiff_t>(s.table_sent), s.cache.table.end());
  s.table_sent = s.cache.table.size();
  if (regime == Regime::chunk) {
    part.snaps = cache_.exports(s.cache, s.computed, s.computed + rows, now_);
    for (const prefix::NewSnapshot& n : part.snaps) step.exports.emplace_back(n.position, n.id);
  }
  parts_.push_back(std::move(part));
  s.started = true;
  s.computed += rows;
  s.pending = regime == Regime::window ? static_cast<int16_t>(rows) : int16_t{0};
  step.logits = s.computed == s.total() && !s.reread ? 1 : 0;
  if (regime == Regime::window && s.drafting.source != DraftSource::none) {
    const auto drafts = static_cast<int16_t>(s.drafting.count);
    const bool given = s.drafting.source == DraftSource::lookup;
    if (given) step.tokens.insert(step.tokens.end(), s.drafting.tokens.begin(), s.drafting.tokens.end());
    (given ? step.drafts : step.propose) = drafts;
    step.logits = static_cast<int16_t>(1 + drafts);
  }
  return step;
}

}  // namespace glm53
