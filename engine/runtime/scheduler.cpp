// The policy. Files: scheduler.cpp (arrival, results, end), scheduler_admission.cpp (who runs), scheduler_steps.cpp
// (what runs in a step), scheduler_output.cpp (what becomes of output); scheduler_queue.h, scheduler_cost.h and
// scheduler_cache.h hold what they decide with.
//
// * Who is next. Requests wait in priority classes, lower numbers first; each minute of waiting gains one class. In a
//   class those come first that ran already and were put back, then requests of the key (client) that was served least,
//   counted in tokens computed, then the first to arrive.
// * Admission. A request starts when a slot is free and blocks are for its whole prompt (those of a cached beginning
//   are shared), for what it has given out, and for the next reserve_output tokens; they are taken at once, before
//   anything is chosen, and a hundredth of the pool stays free. What can never fit is refused. A request that does not
//   fit now is passed over for the sake of smaller ones behind it, until it has waited for `patience`: then nobody
//   overtakes it, and it starts as soon as enough has ended.
// * While the machine is short of memory, requests with long prompts that have not run yet are left out of this.
// * Promise. What was admitted ends. Blocks for output beyond the reservation are taken as they are needed: from the
//   free ones, then from the prefix cache, then by putting back the running sequence that is last by (class,
//   arrival), be it the one that asks. The first by that order is never put back, and any single request fits.
// * A request whose priority number is smaller than the class in which a running one was admitted puts that one back
// when
//   it finds no slot or blocks. Equal ones never displace each other, and what a request gained by waiting stays its
//   own.
// * Putting back keeps the output and gives slot and blocks away. Its state is saved as a snapshot where one is to be
//   had, and its blocks stay cached until somebody needs them; later it goes on from there, or from the best that is
//   left, computing the rest again in the regimes that it was computed in first. Its text does not change by it.
// * Every step runs all sequences that generate, one row each; more for rows that are known already (after a replay or
//   when put back), up to max_window in a step where rows are left, and for drafts. Of these as many are verified as
//   give most tokens a millisecond, by what a step costs with more rows and how often drafts were accepted
//   (draft_policy.h); they take blocks that nobody else needs, and nobody is put back for them.
// * Prompts are read beside them, a piece at a time, by the sequence whose last piece is longest ago, so that several
//   prompts advance alike. While anybody generates prompts have prefill_share of the time, and a piece passes a few
//   layers in each step: as many as the generating part of the step pays for (at least one where nothing is owed, and
//   never so many that the step takes more than three times as long). The piece is the shortest that is read nearly as
//   fast, by the row, as the longest; one chunk at least. What rows cost is learned from the steps that ran. With
//   nobody generating a piece is as large as may be and passes all layers at once.
// * Prompt positions run in the chunk regime, in pieces that end on the absolute 64-token grid or at the end of the
//   prompt. The last prompt row gives the first output token. Positions behind the prompt run in the window regime.
//   Which of the two depends on the position alone, so the numbers do not depend on who else is running.
// * A request that was running when a rank died comes back with the tokens already given out. They are rows like any
//   others of the window regime; sampling goes on behind them.
// * A window's rows are records until the next step of the sequence commits them (`replay`): without drafts all of
//   them, with drafts those that were accepted. That is how every rank learns what became of them.
// * Output is not offered to others (reuse_output "never"); or, at its end, as it is ("always"); or it waits to be read
//   again as a prompt ("idle"). That is done while no request is here, newest first, and stops as soon as one comes.
// * Cancelling, or a deadline, frees slot and blocks at once. Plans run in order, so a later plan may give them to
//   somebody else even while the last one runs; the result that still comes is passed over. What had been finished of
//   the prompt stays cached.
#include "engine/runtime/scheduler.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"
#include "engine/runtime/token_rules.h"

namespace glm53 {
namespace {

constexpr int kBadRequest = 400, kTooMany = 429, kUnavailable = 503, kTimeout = 504;
constexpr std::string_view kCanary = "canary";

constexpr uint32_t kRetrySoon = 5, kLongestWait = 600;   // seconds
constexpr double kMemory = 0.9;                          // of the time a request takes, by each that ends
constexpr double kLookupPrior = 0.7, kModelPrior = 0.8;  // acceptance of a draft, before anything was verified
constexpr int kAllMemory = 200;                          // drafts of all requests that count for a new one

size_t tokens_of(const wire::Submit& request) {
  return request.prompt.size() + request.emitted.size();
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits, SamplingTable& sampling, uint64_t generation)
    : limits_(limits),
      sampling_(sampling),
      generation_(generation),
      cache_({.blocks = limits.blocks,
              .snaps = limits.snaps,
              .interval = limits.snap_interval,
              .spill = limits.snaps > 0 ? limits.spill : nullptr,
              .identity = limits.identity,
              .restore_blocks = limits.restore_blocks}),
      slots_(0, limits.max_seqs),
      waiting_(limits.aging),
      all_lookup_(kLookupPrior, kAllMemory),
      all_model_(kModelPrior, kAllMemory),
      share_(limits.prefill_share, limits.max_piece_ms, limits.layers) {
  if (limits.max_seqs < 1 || limits.max_window < 1 || limits.max_context < 1 || limits.blocks < 2)
    throw Error(Code::config, "scheduler: max_seqs, max_window and max_context must be at least 1, blocks at least 2");
  if (limits.prefill_chunk < kChunk || limits.prefill_chunk % kChunk != 0)
    throw Error(Code::config, cat("serve.prefill_chunk is ", limits.prefill_chunk), cat("use a multiple of ", kChunk));
  if (limits.reserve_output < 1)
    throw Error(Code::config, cat("sched.reserve_output is ", limits.reserve_output), "at least 1");
  for (const int32_t drafts : {limits.lookup_drafts, limits.model_drafts})
    if (drafts < 0 || drafts > kMostDrafts || drafts >= limits.max_window)
      throw Error(Code::config, cat("scheduler: ", drafts, " drafts in a window of ", limits.max_window, " rows"),
                  "at most one less than the window has, and at most 15");
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
  if (code == kUnavailable) d.retry_after_s = kRetrySoon;
  return d;
}

/// Too much waits already.
wire::Delta Scheduler::busy(const wire::Submit& request, std::string error) const {
  wire::Delta d = failed(request, request.emitted.size(), kTooMany, std::move(error));
  d.retry_after_s = wait_estimate();
  return d;
}

/// Seconds until what waits now has had its turn, by what requests took so far; at least 1.
uint32_t Scheduler::wait_estimate() const {
  const double ms = request_ms_ * static_cast<double>(waiting_.size() + 1);
  return static_cast<uint32_t>(std::clamp(ms / 1000, 1.0, static_cast<double>(kLongestWait)));
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
  if (std::string finding = check_rules(r.grammar, space); !finding.empty())
    return fail(kBadRequest, std::move(finding));
  const auto context = static_cast<size_t>(limits_.max_context);
  if (r.prompt.size() >= context || r.sampling.max_tokens > limits_.max_context - static_cast<int32_t>(r.prompt.size()))
    return fail(kBadRequest,
                cat("prompt of ", r.prompt.size(), " tokens and output of ", std::max(r.sampling.max_tokens, 1),
                    " tokens are longer than the context of ", limits_.max_context, " tokens"));
  if (r.emitted.size() > static_cast<size_t>(max_output_of(r)))
    return fail(kBadRequest,
                cat(r.emitted.size(), " tokens were given out already, at most ", max_output_of(r), " are allowed"));
  if (blocks_of_all(r) > cache_.blocks().total())
    return fail(kBadRequest, cat("prompt and output need ", blocks_of_all(r) * kBlockTokens,
                                 " tokens of KV cache, there are ", cache_.blocks().total() * kBlockTokens));
  if (r.replayed) return std::nullopt;  // its client was promised an answer
  if (waiting_.empty() && slots_.available() > 0 && cache_.could_take(blocks_to_start(r))) return std::nullopt;
  if (waiting_.size() >= limits_.max_queue)
    return busy(r, cat(waiting_.size(), " requests are waiting, at most ", limits_.max_queue, " may"));
  if (waiting_.tokens() + tokens_of(r) > limits_.max_queue_tokens)
    return busy(
        r, cat("waiting requests hold ", waiting_.tokens(), " tokens, at most ", limits_.max_queue_tokens, " may"));
  return std::nullopt;
}

/// A replayed request may have had its last token.
bool Scheduler::ended_before(const wire::Submit& request) {
  const size_t emitted = request.emitted.size();
  if (emitted == 0) return false;
  const SamplingState state(request, sampling_.space());
  if (state.stops(request.emitted.back())) {
    deltas_.push_back(ended(request, emitted, "stop"));
    deltas_.back().stop_token = request.emitted.back();
    return true;
  }
  if (emitted < static_cast<size_t>(max_output_of(request))) return false;
  deltas_.push_back(ended(request, emitted, "length"));
  return true;
}

void Scheduler::submit(wire::Submit request) {
  stop_reread();
  drop(request.id);
  if (auto why = refusal(request)) {
    deltas_.push_back(std::move(*why));
    return;
  }
  if (ended_before(request)) return;
  waiting_.enter(request.key);
  waiting_.push({.request = std::move(request), .arrival = ++arrivals_, .since = now_, .cached = {}});
  blocked_ = false;
  admit();
}

void Scheduler::cancel(uint64_t id, std::optional<uint32_t> keep_tokens) {
  if (const auto at = by_id_.find(id); at != by_id_.end() && keep_tokens) keep_output(*at->second, *keep_tokens);
  if (const auto was = drop(id)) {
    deltas_.push_back(ended(was->request, was->output, "abort"));
    admit();
  }
}

std::optional<Scheduler::Dropped> Scheduler::drop(uint64_t id) {
  if (const auto at = by_id_.find(id); at != by_id_.end()) {
    Dropped was{at->second->request, at->second->output.size()};
    end(at->second);
    return was;
  }
  auto waiting = waiting_.take(id);
  if (!waiting) return std::nullopt;
  abandon_restore(*waiting);
  waiting_.leave(waiting->request.key);
  cache_.forget(id);
  blocked_ = false;
  const size_t output = waiting->request.emitted.size();
  return Dropped{std::move(waiting->request), output};
}

void Scheduler::cancel_all() {
  for (const Waiting& w : waiting_.remove_if([](const Waiting&) { return true; })) {
    abandon_restore(w);
    waiting_.leave(w.request.key);
    cache_.forget(w.request.id);
  }
  while (!running_.empty()) end(running_.begin());
  deltas_.clear();
}

void Scheduler::reset_cache() {
  stop_reread();
  rereads_.clear();
  cache_.clear();
}

void Scheduler::drain() {
  draining_ = true;
  stop_reread();
  rereads_.clear();
  for (const Waiting& w : waiting_.remove_if([](const Waiting& waiting) { return !waiting.preempted; })) {
    abandon_restore(w);
    waiting_.leave(w.request.key);
    deltas_.push_back(failed(w.request, w.request.emitted.size(), kUnavailable, "the server is shutting down"));
  }
  blocked_ = false;
}

void Scheduler::expire(Time now) {
  std::vector<uint64_t> late;
  const auto is_late = [&](const wire::Submit& r) { return r.deadline_ms > 0 && now.count() >= r.deadline_ms; };
  for (const Sequence& s : running_)
    if (is_late(s.request)) late.push_back(s.request.id);
  for (const uint64_t id : late) {
    const Dropped was = drop(id).value();
    deltas_.push_back(failed(was.request, was.output, kTimeout, "the request's deadline has passed"));
  }
  for (const Waiting& w : waiting_.remove_if([&](const Waiting& waiting) { return is_late(waiting.request); })) {
    abandon_restore(w);
    waiting_.leave(w.request.key);
    cache_.forget(w.request.id);
    blocked_ = false;
    deltas_.push_back(failed(w.request, w.request.emitted.size(), kTimeout, "the request's deadline has passed"));
  }
}

// ---- results

void Scheduler::complete(const StepResult& result) {
  if (flights_.empty() || flights_.front().step != result.step)
    throw Error(Code::internal, cat("the result of step ", result.step, " came, expected that of ",
                                    flights_.empty() ? uint64_t{0} : flights_.front().step));
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  if (flight.window_rows + flight.chunk_rows > 0) learn(flight, result);  // else it only moved what was spilled
  busy_ms_ += result.device_ms;
  std::unordered_map<uint64_t, Part*> parts;
  for (Part& part : flight.parts) parts[part.request] = &part;
  const auto running = [&](const SeqResult& r) {
    const auto at = by_id_.find(r.request);
    const auto part = parts.find(r.request);
    return at != by_id_.end() && part != parts.end() && at->second->serial == part->second->serial ? at->second
                                                                                                   : running_.end();
  };
  for (const SeqResult& r : result.seqs)
    if (const auto at = running(r); at != running_.end()) take_drafts(*at, *parts[r.request], r);
  for (Part& part : flight.parts) finish(part);
  for (const SeqResult& r : result.seqs)
    for (const SampledToken& token : r.tokens)
      if (const auto at = running(r); at != running_.end()) take_token(at, token);
}

/// What the step computed is there now, whether or not its sequence still is.
void Scheduler::finish(Part& part) {
  const auto at = by_id_.find(part.request);
  if (at == by_id_.end() || at->second->serial != part.serial) {
    if (part.restoring != prefix::LeaseId::none) cache_.drop_restore(part.restoring);
    cache_.drop(part.snaps);
    blocked_ = false;
    return;
  }
  Sequence& s = *at->second;
  s.finished = part.end;
  if (part.restoring != prefix::LeaseId::none) blocked_ = false;
  cache_.restored(s.cache);
  if (!part.snaps.empty() || s.finished == s.prompt()) remember(s, std::move(part.snaps));
  if (s.reread && s.finished == s.prompt()) return end(at->second);
  if (limits_.reuse_output == ReuseOutput::always) mark(s);
}

void Scheduler::take_token(Running::iterator at, const SampledToken& sampled) {
  Sequence& s = *at;
  if (s.computed < s.total())
    throw Error(Code::internal,
                cat("request ", s.request.id, ": a token came for position ", s.total(), " of ", s.computed));
  if (sampled.token < 0) {
    deltas_.push_back(failed(s.request, s.output.size(), kBadRequest,
                             "no token is allowed here: allowed_token_ids, logit_bias or the grammar forbid all"));
    end(at);
    return;
  }
  wire::Delta d = ended(s.request, s.output.size(), "");
  d.cached_tokens = s.cached;
  d.draft_tokens = s.drafting.drafted;
  d.draft_accepted = s.drafting.accepted;
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
  waiting_.charge(s.request.key, 1);
  if (!over) return;
  keep_output(s, s.output.size());
  request_ms_ = request_ms_ == 0 ? busy_ms_ : kMemory * request_ms_ + (1 - kMemory) * busy_ms_;
  busy_ms_ = 0;
  end(at);
}

std::vector<wire::Delta> Scheduler::take_deltas() {
  return std::exchange(deltas_, {});
}

// ---- looking at it

wire::Stats Scheduler::stats() const {
  wire::Stats s;
  s.step = step_;
  s.running = static_cast<uint32_t>(running_.size() - (rereads() ? 1 : 0));
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
  s.preemptions = preemptions_;
  s.restores = restores_done_;
  s.restores_failed = restores_failed_;
  s.prefix_queries = prefix_queries_;
  s.prefix_hits = prefix_hits_;
  s.snaps_written = counted.snaps_inserted;
  s.snaps_evicted = counted.snaps_evicted + counted.snaps_thinned;
  s.blocks_evicted = counted.blocks_evicted;
  s.draft_steps = drafts_.steps;
  s.draft_tokens = drafts_.drafted;
  s.draft_accepted = drafts_.accepted;
  s.draft_accepted_at.assign(drafts_.at.begin(), drafts_.at.end());
  s.drafter_paused = drafter_paused_;
  s.gate_open = gate_open_;
  return s;
}

void Scheduler::check() const {
  size_t written = 0;
  std::vector<const CacheGrant*> grants;
  for (const Sequence& s : running_) {
    grants.push_back(&s.cache);
    written += s.mark.id != SnapId::none ? 1 : 0;
  }
  for (const auto& [id, restoring] : restores_) grants.push_back(&restoring.cache.grant);
  written += restores_.size();
  for (const Flight& f : flights_)
    for (const Part& p : f.parts) written += p.snaps.size();
  if (piece_)
    for (const Part& p : piece_->parts) written += p.snaps.size();
  cache_.check(grants, written);
  slots_.check(running_.size(), "slot");
  waiting_.check();
  if (by_id_.size() != running_.size() || sampling_.size() != running_.size())
    throw Error(Code::internal, cat("scheduler: ", running_.size(), " sequences, ", by_id_.size(), " by id, ",
                                    sampling_.size(), " with sampling state"));
  if (idle() && waiting_.keys() != running_.size())
    throw Error(Code::internal, cat("scheduler: idle, but ", waiting_.keys(), " fairness keys have requests"));
}

}  // namespace glm53
