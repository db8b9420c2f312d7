// The policy, simple on purpose:
//
// * First come, first served. The oldest waiting request is admitted when a slot is free and the blocks for its whole
//   prompt and all its output are; they are taken at once. So every admitted request can finish whatever the others do,
//   and nothing is ever preempted. A big request at the head of the queue holds back smaller ones behind it, until
//   running ones end.
// * Every step runs all sequences that generate, one row each, and beside them at most prefill_chunk prompt tokens of
//   the oldest sequences that still read their prompt. A decoder so waits for at most one such piece between two
//   tokens, and a prompt never waits for decoders to end.
// * Prompt positions run in the chunk regime, in pieces that end on the absolute 64-token grid or at the end of the
//   prompt. The last prompt row gives the first output token. Positions behind the prompt run in the window regime.
//   Which of the two depends on the position alone, so the numbers do not depend on who else is running.
// * A request that was running when a rank died comes back with the tokens already given out. They are rows like any
//   others of the window regime, up to max_window in a step where rows are left; sampling goes on behind them.
// * A window's rows are records until the next step of the sequence commits them (`replay`): without drafts all of
//   them.
// * Cancelling frees slot and blocks at once. Plans run in order, so a later plan may give them to somebody else even
//   while the last one runs; the result that still comes is passed over.
// * Priorities and fairness keys are not looked at yet.
#include "engine/runtime/scheduler.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr int kBadRequest = 400, kTooMany = 429, kUnavailable = 503, kTimeout = 504;
constexpr std::string_view kCanary = "canary";

size_t tokens_of(const wire::Submit& request) {
  return request.prompt.size() + request.emitted.size();
}

}  // namespace

int32_t Scheduler::Sequence::token_at(int32_t position) const {
  return position < prompt() ? request.prompt[static_cast<size_t>(position)]
                             : output[static_cast<size_t>(position - prompt())];
}

Scheduler::Scheduler(const SchedulerLimits& limits, SamplingTable& sampling, uint64_t generation)
    : limits_(limits),
      sampling_(sampling),
      generation_(generation),
      cache_({.blocks = limits.blocks, .snaps = limits.snaps, .interval = limits.snap_interval}),
      slots_(0, limits.max_seqs) {
  if (limits.max_seqs < 1 || limits.max_window < 1 || limits.max_context < 1 || limits.blocks < 2)
    throw Error(Code::config, "scheduler: max_seqs, max_window and max_context must be at least 1, blocks at least 2");
  if (limits.prefill_chunk < kChunk || limits.prefill_chunk % kChunk != 0)
    throw Error(Code::config, cat("serve.prefill_chunk is ", limits.prefill_chunk), cat("use a multiple of ", kChunk));
  if (limits.max_rows < limits.max_seqs + kChunk)
    throw Error(
        Code::config,
        cat("a step of ", limits.max_rows, " rows is too small for ", limits.max_seqs, " sequences and a prompt piece"),
        cat("at least ", limits.max_seqs + kChunk));
}

// ---- arrival and end

wire::Delta Scheduler::ended(const wire::Submit& request, size_t index, std::string finish) {
  wire::Delta d;
  d.id = request.id;
  d.index = static_cast<uint32_t>(index);
  d.finish = std::move(finish);
  return d;
}

wire::Delta Scheduler::failed(const wire::Submit& request, size_t index, int code, std::string error) {
  wire::Delta d = ended(request, index, "error");
  d.error = std::move(error);
  d.error_code = code;
  return d;
}

/// Output tokens of the request, those already emitted included; 0 = none named: what fits.
int32_t Scheduler::max_output_of(const wire::Submit& request) const {
  const int32_t room = limits_.max_context - static_cast<int32_t>(request.prompt.size());
  return request.sampling.max_tokens > 0 ? request.sampling.max_tokens : room;
}

size_t Scheduler::blocks_for(const wire::Submit& request) const {
  const size_t tokens = request.prompt.size() + static_cast<size_t>(max_output_of(request));
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

bool Scheduler::fits_now(const wire::Submit& request) const {
  return slots_.available() > 0 && cache_.could_take(blocks_for(request));
}

/// Why a request is not even queued.
std::optional<wire::Delta> Scheduler::refusal(const wire::Submit& r) const {
  const auto fail = [&](int code, std::string why) { return failed(r, r.emitted.size(), code, std::move(why)); };
  if (draining_) return fail(kUnavailable, "the server is shutting down");
  if (!gate_open_ && r.key != kCanary) return fail(kUnavailable, "the server is not ready yet");
  if (r.prompt.empty()) return fail(kBadRequest, "the prompt is empty");
  const TokenSpace& space = sampling_.space();
  for (const auto* tokens : {&r.prompt, &r.emitted})
    for (const int32_t t : *tokens)
      if (t < 0 || t >= space.vocab)
        return fail(kBadRequest, cat("token ", t, " is not in the vocabulary of ", space.vocab));
  if (std::string finding = check_sampling(r.sampling, space); !finding.empty())
    return fail(kBadRequest, std::move(finding));
  const auto context = static_cast<size_t>(limits_.max_context);
  if (r.prompt.size() >= context || r.sampling.max_tokens > limits_.max_context - static_cast<int32_t>(r.prompt.size()))
    return fail(kBadRequest,
                cat("prompt of ", r.prompt.size(), " tokens and output of ", std::max(r.sampling.max_tokens, 1),
                    " tokens are longer than the context of ", limits_.max_context, " tokens"));
  if (r.emitted.size() > static_cast<size_t>(max_output_of(r)))
    return fail(kBadRequest,
                cat(r.emitted.size(), " tokens were given out already, at most ", max_output_of(r), " are allowed"));
  if (blocks_for(r) > cache_.blocks().total())
    return fail(kBadRequest, cat("prompt and output need ", blocks_for(r) * kBlockTokens,
                                 " tokens of KV cache, there are ", cache_.blocks().total() * kBlockTokens));
  if (waiting_.empty() && fits_now(r)) return std::nullopt;
  if (waiting_.size() >= limits_.max_queue)
    return fail(kTooMany, cat(waiting_.size(), " requests are waiting, at most ", limits_.max_queue, " may"));
  if (waiting_tokens_ + tokens_of(r) > limits_.max_queue_tokens)
    return fail(kTooMany,
                cat("waiting requests hold ", waiting_tokens_, " tokens, at most ", limits_.max_queue_tokens, " may"));
  return std::nullopt;
}

void Scheduler::submit(wire::Submit request) {
  drop(request.id);
  if (auto why = refusal(request)) {
    deltas_.push_back(std::move(*why));
    return;
  }
  // A replayed request may have had its last token.
  const size_t emitted = request.emitted.size();
  if (emitted > 0) {
    const SamplingState state(request, sampling_.space());
    if (state.stops(request.emitted.back())) {
      deltas_.push_back(ended(request, emitted, "stop"));
      deltas_.back().stop_token = request.emitted.back();
      return;
    }
    if (emitted == static_cast<size_t>(max_output_of(request))) {
      deltas_.push_back(ended(request, emitted, "length"));
      return;
    }
  }
  waiting_tokens_ += tokens_of(request);
  waiting_.push_back(std::move(request));
  admit();
}

void Scheduler::cancel(uint64_t id) {
  if (const auto was = drop(id)) {
    deltas_.push_back(ended(was->request, was->output, "abort"));
    admit();
  }
}

std::optional<Scheduler::Dropped> Scheduler::drop(uint64_t id) {
  if (const auto at = by_id_.find(id); at != by_id_.end()) {
    Dropped was{at->second->request, at->second->output.size()};
    release(at->second);
    return was;
  }
  const auto at = std::find_if(waiting_.begin(), waiting_.end(), [&](const wire::Submit& r) { return r.id == id; });
  if (at == waiting_.end()) return std::nullopt;
  Dropped was{std::move(*at), 0};
  was.output = was.request.emitted.size();
  waiting_tokens_ -= tokens_of(was.request);
  waiting_.erase(at);
  return was;
}

void Scheduler::cancel_all() {
  waiting_.clear();
  waiting_tokens_ = 0;
  while (!running_.empty()) release(running_.begin());
  deltas_.clear();
}

void Scheduler::drain() {
  draining_ = true;
  for (const wire::Submit& r : waiting_)
    deltas_.push_back(failed(r, r.emitted.size(), kUnavailable, "the server is shutting down"));
  waiting_.clear();
  waiting_tokens_ = 0;
}

void Scheduler::expire(Time now) {
  const auto late = [&](const wire::Submit& r) { return r.deadline_ms > 0 && now.count() >= r.deadline_ms; };
  const std::string why = "the request's deadline has passed";
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    if (!late(*at)) {
      ++at;
      continue;
    }
    deltas_.push_back(failed(*at, at->emitted.size(), kTimeout, why));
    waiting_tokens_ -= tokens_of(*at);
    at = waiting_.erase(at);
  }
  for (auto at = running_.begin(); at != running_.end();) {
    const auto next = std::next(at);
    if (late(at->request)) {
      deltas_.push_back(failed(at->request, at->output.size(), kTimeout, why));
      release(at);
    }
    at = next;
  }
}

void Scheduler::admit() {
  while (!waiting_.empty() && slots_.available() > 0) {
    const size_t tokens = tokens_of(waiting_.front());
    if (!start(waiting_.front())) return;
    waiting_.pop_front();
    waiting_tokens_ -= tokens;
  }
}

/// False when its blocks are not to be had; the request is then as it was.
bool Scheduler::start(wire::Submit& request) {
  std::optional<CacheGrant> cache =
      cache_.reserve({.salt = request.salt,
                      .prefix = {.tokens = request.prompt, .prompt = static_cast<int32_t>(request.prompt.size())},
                      .boundaries = request.boundaries,
                      .blocks = blocks_for(request),
                      .write = request.cache_write},
                     now_);
  if (!cache) return false;
  Sequence seq;
  seq.serial = ++serial_;
  seq.max_output = max_output_of(request);
  seq.cache = std::move(*cache);
  seq.computed = seq.finished = seq.cache.position;
  seq.slot = slots_.take().value();
  seq.output = request.emitted;
  seq.request = std::move(request);
  prefix_queries_ += seq.request.prompt.size();
  prefix_hits_ += static_cast<uint64_t>(seq.cache.position);
  sampling_.add(seq.request);
  running_.push_back(std::move(seq));
  by_id_[running_.back().request.id] = std::prev(running_.end());
  return true;
}

void Scheduler::release(Running::iterator at) {
  if (at->finished < at->prompt()) remember(*at, {});
  cache_.release(at->cache, at->started);
  slots_.give(at->slot);
  if (at->started) released_.push_back(at->slot);
  sampling_.remove(at->request.id);
  by_id_.erase(at->request.id);
  running_.erase(at);
}

// ---- steps

std::optional<StepPlan> Scheduler::plan(Time now) {
  now_ = std::max(now_, now);
  expire(now);
  admit();
  StepPlan plan;
  int32_t rows_left = limits_.max_rows;
  plan_windows(plan, rows_left);
  plan_chunks(plan, rows_left);
  if (plan.seqs.empty()) return std::nullopt;
  plan.generation = generation_;
  plan.step = ++step_;
  plan.release = std::exchange(released_, {});
  flights_.push_back({plan.step, std::exchange(parts_, {})});
  return plan;
}

/// One row for every sequence that generates; more only for tokens that are known already, where rows are left beside a
/// prompt piece.
void Scheduler::plan_windows(StepPlan& plan, int32_t& rows_left) {
  int32_t spare = rows_left - kChunk;
  for (const Sequence& s : running_)
    if (s.computed >= s.prompt() && s.computed < s.total()) --spare;
  for (Sequence& s : running_) {
    const int32_t ahead = s.total() - s.computed;
    if (s.computed < s.prompt() || ahead == 0) continue;
    const int32_t extra = std::clamp(std::min(ahead, limits_.max_window) - 1, 0, std::max(spare, 0));
    spare -= extra;
    rows_left -= 1 + extra;
    plan.seqs.push_back(step_of(s, Regime::window, 1 + extra));
  }
}

void Scheduler::plan_chunks(StepPlan& plan, int32_t rows_left) {
  int32_t budget = std::min(limits_.prefill_chunk, rows_left);
  for (Sequence& s : running_) {
    if (s.computed >= s.prompt()) continue;
    const int32_t reach = s.computed + budget;
    const int32_t end = reach >= s.prompt() ? s.prompt() : reach / kChunk * kChunk;
    if (end <= s.computed) continue;
    budget -= end - s.computed;
    prompt_tokens_ += static_cast<uint64_t>(end - s.computed);
    plan.seqs.push_back(step_of(s, Regime::chunk, end - s.computed));
  }
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
    step.append = s.cache.table;
    step.restore = s.cache.restore;
    if (s.cache.copy != BlockId::null) step.copy.emplace_back(s.cache.copy, s.cache.table.at(s.cache.copy_to));
    if (s.cache.restoring) part.restoring = s.cache.lease;
  }
  if (regime == Regime::chunk) {
    part.snaps = cache_.exports(s.cache, s.computed, s.computed + rows, now_);
    for (const prefix::NewSnapshot& n : part.snaps) step.exports.emplace_back(n.position, n.id);
  }
  parts_.push_back(std::move(part));
  s.started = true;
  s.computed += rows;
  s.pending = regime == Regime::window ? static_cast<int16_t>(rows) : int16_t{0};
  step.logits = s.computed == s.total() ? 1 : 0;
  return step;
}

void Scheduler::complete(const StepResult& result) {
  if (flights_.empty() || flights_.front().step != result.step)
    throw Error(Code::internal, cat("the result of step ", result.step, " came, expected that of ",
                                    flights_.empty() ? uint64_t{0} : flights_.front().step));
  for (Part& part : flights_.front().parts) finish(part);
  flights_.pop_front();
  for (const SeqResult& r : result.seqs) {
    const auto at = by_id_.find(r.request);
    if (at == by_id_.end() || r.tokens.empty()) continue;
    take_token(at->second, r.tokens.front());
  }
}

/// What the step computed is there now, whether or not its sequence still is.
void Scheduler::finish(Part& part) {
  const auto at = by_id_.find(part.request);
  if (at == by_id_.end() || at->second->serial != part.serial) {
    if (part.restoring != prefix::LeaseId::none) cache_.drop_restore(part.restoring);
    cache_.drop(part.snaps);
    return;
  }
  Sequence& s = *at->second;
  s.finished = part.end;
  cache_.restored(s.cache);
  if (!part.snaps.empty() || s.finished == s.prompt()) remember(s, std::move(part.snaps));
}

/// Registers the prompt as far as it has been read, with snapshots that were written.
void Scheduler::remember(Sequence& s, std::vector<prefix::NewSnapshot> snaps) {
  const int32_t count = std::min(s.finished, s.prompt());
  if (limits_.snaps == 0 || !s.request.cache_write || count <= s.cache.registered) {
    cache_.drop(snaps);
    return;
  }
  const std::span<const int32_t> tokens(s.request.prompt.data(), static_cast<size_t>(count));
  cache_.insert(s.cache, {.tokens = tokens, .prompt = s.prompt()}, std::move(snaps), now_);
}

void Scheduler::take_token(Running::iterator at, const SampledToken& sampled) {
  Sequence& s = *at;
  if (s.computed != s.total())
    throw Error(Code::internal,
                cat("request ", s.request.id, ": a token came for position ", s.computed, " of ", s.total()));
  if (sampled.token < 0) {
    deltas_.push_back(failed(s.request, s.output.size(), kBadRequest,
                             "no token is allowed here: allowed_token_ids, logit_bias or the grammar forbid all"));
    release(at);
    return;
  }
  wire::Delta d = ended(s.request, s.output.size(), "");
  d.cached_tokens = static_cast<uint32_t>(s.cache.position);
  d.tokens.push_back(sampled.token);
  if (s.request.sampling.logprobs >= 0) d.logprobs.push_back({sampled.logprob, sampled.top});
  s.output.push_back(sampled.token);
  ++generated_tokens_;
  const SamplingState* state = sampling_.find(s.request.id);
  if (state == nullptr) throw Error(Code::internal, cat("request ", s.request.id, " runs without sampling state"));
  if (state->stops(sampled.token)) {
    d.finish = "stop";
    d.stop_token = sampled.token;
  } else if (static_cast<int32_t>(s.output.size()) >= s.max_output) {
    d.finish = "length";
  }
  const bool over = !d.finish.empty();
  deltas_.push_back(std::move(d));
  if (over) release(at);
}

std::vector<wire::Delta> Scheduler::take_deltas() {
  return std::exchange(deltas_, {});
}

// ---- looking at it

wire::Stats Scheduler::stats() const {
  wire::Stats s;
  s.step = step_;
  s.running = static_cast<uint32_t>(running_.size());
  s.waiting = static_cast<uint32_t>(waiting_.size());
  // What only the prefix cache holds is free for whoever needs it.
  s.blocks_used = static_cast<uint32_t>(cache_.blocks().used() - cache_.idle_blocks());
  s.blocks_total = static_cast<uint32_t>(cache_.blocks().total());
  s.slots_used = static_cast<uint32_t>(slots_.used());
  s.slots_total = static_cast<uint32_t>(slots_.total());
  s.prompt_tokens = prompt_tokens_;
  s.generated_tokens = generated_tokens_;
  const prefix::Contents held = cache_.index().contents();
  const prefix::Counters& counted = cache_.index().counters();
  s.blocks_cached = static_cast<uint32_t>(held.blocks);
  s.snaps_used = static_cast<uint32_t>(cache_.snaps().used());
  s.snaps_total = static_cast<uint32_t>(cache_.snaps().total());
  s.prefix_queries = prefix_queries_;
  s.prefix_hits = prefix_hits_;
  s.snaps_written = counted.snaps_inserted;
  s.snaps_evicted = counted.snaps_evicted + counted.snaps_thinned;
  s.blocks_evicted = counted.blocks_evicted;
  s.gate_open = gate_open_;
  return s;
}

void Scheduler::check() const {
  size_t waiting = 0, written = 0;
  std::vector<const CacheGrant*> grants;
  for (const Sequence& s : running_) grants.push_back(&s.cache);
  for (const wire::Submit& r : waiting_) waiting += tokens_of(r);
  for (const Flight& f : flights_)
    for (const Part& p : f.parts) written += p.snaps.size();
  cache_.check(grants, written);
  slots_.check(running_.size(), "slot");
  if (by_id_.size() != running_.size() || sampling_.size() != running_.size() || waiting != waiting_tokens_)
    throw Error(Code::internal,
                cat("scheduler: ", running_.size(), " sequences, ", by_id_.size(), " by id, ", sampling_.size(),
                    " with sampling state, ", waiting_tokens_, " waiting tokens counted as ", waiting));
}

}  // namespace glm53
