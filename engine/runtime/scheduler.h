// Which rows of which requests run in the next step. Policy: scheduler.cpp.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/runtime/draft_lookup.h"
#include "engine/runtime/draft_policy.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/pools.h"
#include "engine/runtime/sampling.h"
#include "engine/runtime/scheduler_cache.h"
#include "engine/runtime/scheduler_cost.h"
#include "engine/runtime/scheduler_queue.h"
#include "engine/runtime/wire.h"

namespace glm53 {

/// What becomes of generated text: cache.reuse_output.
enum class ReuseOutput : uint8_t {
  never,   ///< a later request reads it as part of its prompt
  idle,    ///< read again as a prompt would be while nothing else is to do; then everybody finds it
  always,  ///< its rows are shared as they are, although they came out of other kernels than a prompt's
};

/// What became of drafts.
struct DraftCounts {
  uint64_t steps = 0, drafted = 0, accepted = 0;  ///< sequences' steps with drafts; drafts in them; of these, accepted
  std::array<uint64_t, kMostDrafts> at{};         ///< accepted by position
};

/// What all ranks are to fetch from their spill tiers.
struct RestoreOrder {
  uint64_t id = 0;
  std::vector<SpillItem> items;
};

struct SchedulerLimits {
  int32_t max_context = 4096;    ///< prompt and output of one request
  int32_t max_seqs = 8;          ///< running at the same time; as many slots exist
  int32_t max_rows = 512;        ///< of one step; at least max_seqs + 64
  int32_t prefill_chunk = 256;   ///< prompt tokens of one step; a multiple of 64
  int32_t max_window = 16;       ///< window rows of one sequence
  int32_t lookup_drafts = 0;     ///< most drafts copied from a request's own text; less than max_window
  int32_t model_drafts = 0;      ///< most drafts of the executor's drafter; less than max_window
  bool chained_drafter = false;  ///< its passes are one after the other, one for each draft
  bool always_draft = false;     ///< whatever drafts cost; for measurements
  int32_t layers = 1;            ///< of the model, between which a piece of a prompt may stop; 1: it never does
  int32_t blocks = 2;            ///< ids of the pool, the null block included
  int32_t snaps = 0;             ///< snapshots of the prefix cache; 0 = no prefix cache
  int32_t snap_interval = 8192;  ///< prompt tokens between interval snapshots; 0 = none
  ReuseOutput reuse_output = ReuseOutput::never;
  const spill::Directory* spill = nullptr;  ///< rank 0's; null = none
  prefix::CacheIdentity identity{};         ///< with it: of what is computed here
  size_t restore_blocks = 0;                ///< most blocks that come back from it at once
  size_t max_queue = 1024;                  ///< waiting requests
  size_t max_queue_tokens = 4000000;        ///< tokens they bring
  int32_t reserve_output = 256;             ///< output tokens for which a request must have blocks to be admitted
  double prefill_share = 0.4;               ///< of the time, for prompts, while others generate
  double max_piece_ms = 600;                ///< longest piece of a prompt meanwhile
  std::chrono::milliseconds aging = std::chrono::seconds(60);      ///< of waiting, for one priority class
  std::chrono::milliseconds patience = std::chrono::seconds(120);  ///< then nobody overtakes the request any more
};

/// Pure bookkeeping: no thread, no clock, no model. One owner calls everything.
class Scheduler {
 public:
  /// Milliseconds of the unix epoch, for deadlines. A clock that jumps hurts deadlines only.
  using Time = std::chrono::milliseconds;

  /// Throws Error(config) for limits that contradict each other. `sampling` outlives the scheduler, which adds and
  /// removes its requests.
  Scheduler(const SchedulerLimits& limits, SamplingTable& sampling, uint64_t generation);

  /// A request arrives. It is refused with a Delta (finish "error") when it can never run, when a queue limit is
  /// reached, when the gate is closed (but for key "canary") or when draining. An id that is known already replaces its
  /// older request.
  void submit(wire::Submit request);
  /// Ends a request in any state; everything it holds is free at once. Unknown ids are ignored. `keep_tokens`: so many
  /// of its output were an answer (a stop string came) and may be reused as reuse_output says; else none.
  void cancel(uint64_t id, std::optional<uint32_t> keep_tokens = std::nullopt);
  /// The API process is gone: as cancel of all, with nobody to tell.
  void cancel_all();
  void set_gate(bool open) { gate_open_ = open; }
  bool gate_open() const { return gate_open_; }
  /// Requests with longer prompts that wait go on waiting; not those that ran before. Nothing: all may start.
  void hold_back(std::optional<size_t> longest_prompt);
  /// Admits nothing new any more; what waits is refused, what runs or ran goes on.
  void drain();

  /// The next step, or nothing when there is nothing to run until a result or a request comes.
  std::optional<StepPlan> plan(Time now);
  /// Results of plans in their order; requests that ended meanwhile are passed over.
  void complete(const StepResult& result);
  /// What the ranks are to fetch, for requests that wait for it.
  std::vector<RestoreOrder> take_restores();
  /// All ranks have what was ordered and keep it for the plan that says where it goes; or some have not.
  void restored(uint64_t id, bool ok);
  /// Forgets what the prefix cache holds; what runs goes on.
  void reset_cache();
  /// What happened to requests since the last call, in order.
  std::vector<wire::Delta> take_deltas();

  /// No request is here; text may still be read again.
  bool idle() const { return running_.size() == (rereads() ? 1 : 0) && waiting_.empty(); }
  const SchedulerCache& cache() const { return cache_; }
  const StepCost& cost() const { return cost_; }
  const DraftCounts& drafts() const { return drafts_; }
  /// The drafter's drafts have all but ceased to be accepted, which no text explains: it is asked no more.
  bool drafter_paused() const { return drafter_paused_; }
  /// The fields that the scheduler knows.
  wire::Stats stats() const;
  /// Throws Error(internal) when pools, table and sequences contradict each other. Cheap enough for every idle turn.
  void check() const;

 private:
  /// What a sequence knows of its drafts.
  struct Drafting {
    LookupIndex lookup;
    Acceptance by_lookup{0, 1}, by_model{0, 1};
    DraftSource source = DraftSource::none;  // of those that are being verified
    std::vector<int32_t> tokens;             // found in its text for the step that is being planned
    int32_t count = 0;                       // drafts of that step
    uint32_t drafted = 0, accepted = 0;      // so far
  };
  struct Sequence {
    wire::Submit request;
    std::vector<int32_t> output;  // emitted ones first
    int32_t max_output = 0;
    SlotId slot = SlotId::none;
    int64_t cls = 0;  // its priority class when it was admitted
    uint64_t arrival = 0;
    Time since{0};        // it waits or runs
    uint64_t serial = 0;  // tells it from an older sequence of the same request
    uint32_t cached = 0;
    CacheGrant cache;
    size_t table_sent = 0;       // blocks that the executor knows
    bool started = false;        // the executor knows its slot
    int32_t computed = 0;        // positions whose rows have run or are planned
    int32_t finished = 0;        // of these, in steps that have finished
    int16_t pending = 0;         // of these, window records not yet committed
    uint64_t last_piece = 0;     // step of its last piece of prompt
    bool held = false;           // rows of it stand between two layers
    bool reread = false;         // nobody's request: text that is read again
    prefix::NewSnapshot mark{};  // with ReuseOutput::always: its state at the last multiple of 64 behind the prompt
    Drafting drafting;

    int32_t prompt() const { return static_cast<int32_t>(request.prompt.size()); }
    int32_t total() const { return prompt() + static_cast<int32_t>(output.size()); }
    bool reads() const { return computed < prompt(); }
    bool generates() const { return !reads() && !held && computed < total(); }
    int32_t token_at(int32_t position) const;
    /// Whether it goes before the other one when there is not enough for both.
    bool before(const Sequence& other) const { return cls != other.cls ? cls < other.cls : arrival < other.arrival; }
  };
  using Running = std::list<Sequence>;
  /// Text of an answer and what was before it, to be read again.
  struct Reread {
    std::string salt;
    std::vector<int32_t> tokens;
  };
  /// A sequence's part of a step that runs.
  struct Part {
    uint64_t request = 0, serial = 0;
    prefix::LeaseId restoring = prefix::LeaseId::none;  // its lease, when the step restores
    int32_t end = 0;                                    // positions that have run then
    std::vector<prefix::NewSnapshot> snaps;
  };
  struct Flight {
    uint64_t step = 0;
    int32_t window_rows = 0, chunk_rows = 0;
    int32_t drafter_passes = 0;  // 0: no drafter ran
    LayerSpan piece;             // as in its plan
    double planned_ms = 0;       // of its prompt rows
    std::vector<Part> parts;
  };
  /// Prompt rows on their way through the layers, a few in each step.
  struct Piece {
    std::vector<Part> parts;
    int32_t rows = 0;
    int32_t layers = 0;  // that have run or are planned
  };
  /// Text on its way for a request that waits.
  struct Restoring {
    uint64_t request = 0;
    CacheRestore cache;
  };
  struct Dropped {
    wire::Submit request;
    size_t output;
  };

  // scheduler.cpp: arrival, end, results
  std::optional<wire::Delta> refusal(const wire::Submit& request) const;
  bool ended_before(const wire::Submit& request);
  /// Forgets a request; what it was, with the tokens given out so far.
  std::optional<Dropped> drop(uint64_t id);
  void expire(Time now);
  void finish(Part& part);
  void take_token(Running::iterator at, const SampledToken& sampled);
  static wire::Delta ended(const wire::Submit& request, size_t index, std::string finish);
  static wire::Delta failed(const wire::Submit& request, size_t index, int code, std::string error);
  wire::Delta busy(const wire::Submit& request, std::string error) const;
  uint32_t wait_estimate() const;

  // scheduler_admission.cpp: who runs
  int32_t max_output_of(const wire::Submit& request) const;
  size_t blocks_of_all(const wire::Submit& request) const;
  size_t blocks_to_start(const wire::Submit& request) const;
  WaitingQueue::Ids held_back() const;
  void admit();
  bool admit(const Waiting& next);
  bool could_displace(const wire::Submit& request, size_t blocks) const;
  std::optional<CacheGrant> reserve(const wire::Submit& request, size_t blocks);
  Sequence fresh();
  void start(Waiting waiting, CacheGrant cache);
  void end(Running::iterator at);
  void leave(Running::iterator at);
  void preempt(Running::iterator at);
  void save(Sequence& seq);
  void remember(Sequence& seq, std::vector<prefix::NewSnapshot> snaps);
  Running::iterator last_of(int64_t behind_class);
  void make_room_for_rows();

  // scheduler_output.cpp: what becomes of output
  bool rereads() const { return !running_.empty() && running_.front().reread; }
  void keep_output(Sequence& seq, size_t kept);
  void share_output(Sequence& seq, size_t kept);
  void mark(Sequence& seq);
  void reread();
  bool start_reread(Reread text);
  void stop_reread();
  // scheduler_restore.cpp: what comes back from the spill tier
  bool start_restore(const Waiting& next);
  void abandon_restore(const Waiting& waiting);
  bool give_up_restore();
  static prefix::Prefix prompt_of(const wire::Submit& request) {
    return {.tokens = request.prompt, .media = {}, .prompt = static_cast<int32_t>(request.prompt.size()), .request = 0};
  }

  // scheduler_steps.cpp: what runs
  void pass_time(Time now);
  // scheduler_drafts.cpp: which drafts are verified, and what came of them
  int32_t most_drafts(const Sequence& seq) const;
  DraftOffer offer(Sequence& seq);
  void choose_drafts(std::span<const std::pair<Sequence*, int32_t>> windows, int32_t spare, Flight& flight);
  void take_drafts(Sequence& seq, Part& part, const SeqResult& result);
  void watch_acceptance(const SeqResult& result);

  SeqStep step_of(Sequence& seq, Regime regime, int32_t rows);
  void plan_windows(StepPlan& plan, Flight& flight);
  void plan_chunks(StepPlan& plan, Flight& flight);
  int32_t plan_rows(StepPlan& plan, int32_t budget);
  void hold(StepPlan& plan, Flight& flight, size_t first_part, int32_t layers);
  void go_on(StepPlan& plan, Flight& flight);
  void drop_dead_piece();
  void learn(const Flight& flight, const StepResult& result);

  const SchedulerLimits limits_;
  SamplingTable& sampling_;
  const uint64_t generation_;
  SchedulerCache cache_;
  SlotPool slots_;
  WaitingQueue waiting_;
  Running running_;  // in the order of admission
  std::unordered_map<uint64_t, Running::iterator> by_id_;
  std::deque<Reread> rereads_;  // to be done, newest last
  std::map<uint64_t, Restoring> restores_;
  std::vector<RestoreOrder> orders_;              // of these, not yet taken
  std::vector<std::pair<uint64_t, bool>> loads_;  // for the next plan
  uint64_t last_restore_ = 0, restores_done_ = 0, restores_failed_ = 0;
  std::deque<Flight> flights_;                       // steps that run, oldest first
  std::vector<Part> parts_;                          // of the step that is being planned
  std::optional<Piece> piece_;                       // with layers left
  double piece_ms_ = 0;                              // that finished steps spent on the newest one
  std::vector<std::pair<SlotId, SnapId>> saves_;     // for the next plan, in front of its releases
  std::vector<std::pair<SlotId, int16_t>> flushes_;  // before those
  std::vector<SlotId> released_;                     // to be told to the executor with the next plan
  std::vector<wire::Delta> deltas_;
  StepCost cost_;
  RowCost window_cost_, drafter_cost_;  // by rows of a step; by drafter_passes of a step
  Acceptance all_lookup_, all_model_;   // of all requests
  DraftCounts drafts_;
  int32_t collapsed_ = 0;  // drafts of the model in a row of which next to none was accepted
  bool drafter_paused_ = false;
  PrefillShare share_;
  bool gate_open_ = false, draining_ = false;
  std::optional<size_t> longest_prompt_;  // that may start now
  bool blocked_ = false;                  // nobody who waits can start until something ends
  uint64_t step_ = 0, serial_ = 0, arrivals_ = 0, last_reread_ = 0, prompt_tokens_ = 0, generated_tokens_ = 0,
           preemptions_ = 0;
  uint64_t prefix_queries_ = 0, prefix_hits_ = 0;  // tokens of admitted prompts; those not computed again
  Time now_{0};                                    // passes with plans, and never jumps
  std::optional<Time> wall_;                       // of the last plan
  double busy_ms_ = 0, request_ms_ = 0;            // of steps since a request ended; as a mean over requests
};

}  // namespace glm53
