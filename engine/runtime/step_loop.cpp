#include "engine/runtime/step_loop.h"

#include <algorithm>
#include <unistd.h>
#include <utility>

#include "common/log.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kWatchdog{1000};  // the contract allows 2 s
constexpr milliseconds kStats{1000};
constexpr milliseconds kStatsAfterChange{50};
constexpr milliseconds kDrainTime{30000};
constexpr milliseconds kFlushTime{1000};
constexpr std::string_view kCanary = "canary";
constexpr int kUnavailable = 503;
constexpr uint32_t kMemoryRetry = 10;  // seconds

Scheduler::Time wall_clock() {
  return std::chrono::duration_cast<Scheduler::Time>(std::chrono::system_clock::now().time_since_epoch());
}

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

/// What comes out of a step in which a peer went away is garbage, and so may be the error that it ends with.
void run_step(const LoopParts& parts, const StepPlan& plan) {
  try {
    parts.executor.submit(plan);
  } catch (const Error&) {
    parts.comm.check();
    throw;
  }
  parts.comm.check();
}

}  // namespace

// ---- Controls

void Controls::on_change(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  wake_ = std::move(wake);
}

void Controls::wake() {
  const std::lock_guard lock(mutex_);
  if (wake_) wake_();
}

void Controls::publish(const wire::Stats& stats) {
  const std::lock_guard lock(mutex_);
  stats_ = stats;
}

void Controls::turned() {
  turned_ = Clock::now().time_since_epoch().count();
}

wire::Stats Controls::stats() const {
  const std::lock_guard lock(mutex_);
  wire::Stats s = stats_;
  const auto age = Clock::now() - Clock::time_point(Clock::duration(turned_.load()));
  s.progress_age_ms =
      static_cast<uint32_t>(std::clamp<int64_t>(std::chrono::duration_cast<milliseconds>(age).count(), 0, 1 << 30));
  s.memory_bytes = resident_bytes(::getpid());
  s.memory_available = available_;
  s.gate_open = gate_;
  return s;
}

void QueueTimes::planned(const StepPlan& plan, Clock::time_point now) {
  for (const SeqStep& seq : plan.seqs) {
    const auto at = of_.find(seq.request);
    if (at == of_.end() || at->second.queue_ms) continue;
    const auto waited = std::chrono::duration_cast<milliseconds>(now - at->second.submitted).count();
    at->second.queue_ms = static_cast<uint32_t>(std::clamp<int64_t>(waited, 0, UINT32_MAX));
  }
}

void QueueTimes::stamp(wire::Delta& delta) {
  const auto at = of_.find(delta.id);
  if (at == of_.end()) return;
  delta.queue_ms = at->second.queue_ms.value_or(0);
  if (!delta.finish.empty()) of_.erase(at);
}

// ---- rank 0

StepLoop::StepLoop(const LoopParts& parts, Scheduler& scheduler, std::string api_socket, const wire::Hello& hello)
    : parts_(parts), scheduler_(scheduler), api_socket_(std::move(api_socket)), hello_(hello) {}

void StepLoop::run(const StepPlan& warm_up, const std::function<void()>& ready) {
  Controls& controls = parts_.controls;
  controls.on_change([this] { mail_.push(Wake{}); });
  parts_.group.serve(
      [this](const ControlFrame& f) {
        if (const auto* memory = std::get_if<MemoryFrame>(&f)) return mail_.push(*memory);
        if (const auto* restored = std::get_if<RestoredFrame>(&f)) return mail_.push(*restored);
        log::warn(cat("a rank sent a frame of kind ", f.index() + 1, ", which only rank 0 sends"));
      },
      [this](const Error& e) {
        mail_.push(Lost{e});
        parts_.comm.abort();
      });
  // The callbacks refer to this object.
  struct Unhook {
    const LoopParts& parts;
    ~Unhook() {
      parts.controls.on_change({});
      if (parts.spill != nullptr) parts.spill->store().cancel_fetches();
      parts.group.shut();
    }
  } const unhook{parts_};
  parts_.group.send(warm_up);
  run_step(parts_, warm_up);
  parts_.executor.poll();
  ApiLink api(api_socket_, hello_, [this](ApiEvent e) { mail_.push(std::move(e)); });
  controls.turned();
  ready();
  for (std::optional<Clock::time_point> give_up;;) {
    turn(api);
    if (!controls.stopping()) continue;
    if (!give_up) give_up = Clock::now() + kDrainTime;
    if (scheduler_.idle() || Clock::now() >= *give_up) break;
  }
  api.flush(kFlushTime);
  parts_.group.stop();
}

void StepLoop::turn(ApiLink& api) {
  parts_.controls.turned();
  apply_controls();
  for (const Event& event : mail_.take()) handle(event);
  const bool worked = step();
  order_restores();
  for (wire::Delta& d : scheduler_.take_deltas()) {
    queue_times_.stamp(d);
    api.send(connection_, std::move(d));
  }
  for (wire::Delta& d : std::exchange(refused_, {})) api.send(connection_, std::move(d));
  report(api);
  if (worked) return;
  if (scheduler_.idle()) scheduler_.check();
  if (!parts_.controls.stopping() || !scheduler_.idle()) mail_.wait_until(next_report());
}

void StepLoop::apply_controls() {
  scheduler_.set_gate(parts_.controls.gate());
  if (parts_.controls.take_cache_reset()) {
    scheduler_.reset_cache();
    if (parts_.spill != nullptr) {
      parts_.spill->store().clear();
      parts_.group.send(ForgetSpilledFrame{});
    }
  }
  if (parts_.controls.draining() && !drained_) {
    drained_ = true;
    parts_.notifier.phase(Phase::draining);
    scheduler_.drain();
  }
}

void StepLoop::handle(const Event& event) {
  if (const auto* lost = std::get_if<Lost>(&event)) throw lost->error;
  if (const auto* api = std::get_if<ApiEvent>(&event)) handle_api(*api);
  if (const auto* answer = std::get_if<RestoredFrame>(&event)) restored(*answer);
  if (const auto* memory = std::get_if<MemoryFrame>(&event)) {
    log::warn(cat("memory of rank ", memory->rank, ": ", name(memory->level)));
    memory_[memory->rank] = memory->level;
  }
}

void StepLoop::handle_api(const ApiEvent& event) {
  if (const auto* connected = std::get_if<ApiConnected>(&event)) {
    scheduler_.cancel_all();
    refused_.clear();
    queue_times_.clear();
    connection_ = connected->connection;
    stats_sent_ = {};
  } else if (const auto* lost = std::get_if<ApiLost>(&event)) {
    if (lost->connection != connection_) return;
    scheduler_.cancel_all();
    refused_.clear();
    queue_times_.clear();
    connection_ = 0;
  } else {
    const auto& m = std::get<ApiMessage>(event);
    receive(m.connection, m.message);
  }
}

void StepLoop::receive(uint64_t connection, const wire::Message& message) {
  if (connection != connection_) return;
  if (const auto* submit = std::get_if<wire::Submit>(&message))
    this->submit(*submit);
  else if (const auto* cancel = std::get_if<wire::Cancel>(&message))
    scheduler_.cancel(cancel->id, cancel->keep_tokens);
  else
    log::warn(cat("the API process sent a frame of kind ", message.index() + 1, ", which only rank 0 sends"));
}

/// A request that is already under way, and a canary, are taken whatever the memory guard says: the one was promised to
/// a client, the other is how an agent learns that all is well.
void StepLoop::submit(const wire::Submit& request) {
  const bool exempt = request.replayed || !request.emitted.empty() || request.key == kCanary;
  auto reason = exempt ? std::nullopt : memory_refusal(memory(), request.prompt.size());
  if (!reason) {
    queue_times_.submitted(request.id, Clock::now());
    return scheduler_.submit(request);
  }
  wire::Delta d;
  d.id = request.id;
  d.finish = "error";
  d.error = std::move(*reason);
  d.error_code = kUnavailable;
  d.retry_after_s = kMemoryRetry;
  refused_.push_back(std::move(d));
}

/// The worst of all ranks.
MemoryLevel StepLoop::memory() const {
  MemoryLevel level = parts_.controls.memory();
  for (const auto& [rank, theirs] : memory_) level = std::max(level, theirs);
  return level;
}

bool StepLoop::step() {
  const auto begun = Clock::now();
  scheduler_.hold_back(longest_prompt(memory()));
  const std::optional<StepPlan> plan = scheduler_.plan(wall_clock());
  if (!plan) return false;
  const auto planned = Clock::now();
  queue_times_.planned(*plan, planned);
  parts_.group.send(*plan);
  const auto sent = Clock::now();
  run_step(parts_, *plan);
  const auto ran = Clock::now();
  StageCosts costs;
  while (auto result = parts_.executor.poll()) {
    costs = result->stages;
    scheduler_.complete(*result);
  }
  const auto done = Clock::now();
  costs.add(Stage::plan, ms_between(begun, planned));
  costs.add(Stage::send, ms_between(planned, sent));
  costs.add(Stage::complete, ms_between(ran, done));
  times_.add(*plan, costs, ms_between(begun, done));
  return true;
}

/// Text for waiting requests is fetched by every rank, each its own part; it is used when all have theirs.
void StepLoop::order_restores() {
  for (RestoreOrder& order : scheduler_.take_restores()) {
    answers_[order.id] = {parts_.group.size(), true};
    parts_.group.send(RestoreFrame{order.id, order.items});
    parts_.spill->fetch(order.id, std::move(order.items), [this, id = order.id](bool ok) {
      mail_.push(RestoredFrame{0, id, ok});
    });
  }
}

void StepLoop::restored(const RestoredFrame& answer) {
  const auto at = answers_.find(answer.restore);
  if (at == answers_.end())
    throw Error(Code::internal,
                cat("rank ", answer.rank, " answers restore ", answer.restore, ", which nobody ordered"));
  at->second.ok = at->second.ok && answer.ok;
  if (--at->second.missing > 0) return;
  const bool ok = at->second.ok;
  answers_.erase(at);
  if (!ok) log::warn(cat("spilled cache: restore ", answer.restore, " failed on a rank; its text is computed again"));
  scheduler_.restored(answer.restore, ok);
}

StepLoop::Clock::time_point StepLoop::next_report() const {
  return std::min(stats_sent_ + (stats_changed_ ? kStatsAfterChange : kStats), watchdog_sent_ + kWatchdog);
}

void StepLoop::report(ApiLink& api) {
  const auto now = Clock::now();
  if (now >= watchdog_sent_ + kWatchdog) {
    parts_.notifier.watchdog();
    watchdog_sent_ = now;
  }
  wire::Stats stats = scheduler_.stats();
  times_.fill(stats);
  stats.memory_level = static_cast<uint32_t>(memory());
  if (parts_.spill != nullptr) {
    const spill::StoreStats spilled = parts_.spill->store().stats();
    stats.spill_memory_bytes = spilled.memory_bytes;
    stats.spill_disk_bytes = spilled.disk_bytes;
    stats.spilled = spilled.put;
    stats.spill_dropped = spilled.dropped;
    stats.spill_disk_ok = spilled.disk_ok;
  }
  if (stats.drafter_paused && !last_.drafter_paused)
    log::warn(
        "next to none of the drafter's drafts is accepted: it is asked no more. Is it a drafter of this model, of this "
        "revision? glm53_spec_decode_num_accepted_tokens_per_pos_total shows at which position acceptance breaks off");
  parts_.controls.publish(stats);
  stats_changed_ = stats.running != last_.running || stats.waiting != last_.waiting ||
                   stats.gate_open != last_.gate_open || stats.drafter_paused != last_.drafter_paused ||
                   stats.memory_level != last_.memory_level;
  if (now < stats_sent_ + (stats_changed_ ? kStatsAfterChange : kStats)) return;
  stats_sent_ = now;
  stats_changed_ = false;
  last_ = stats;
  api.send(connection_, parts_.controls.stats());
}

// ---- the other ranks

namespace {

struct RankLost {
  Error error;
};
struct Fetched {
  uint64_t restore = 0;
  bool ok = false;
};
using FollowerEvent = std::variant<ControlFrame, RankLost, Fetched>;

/// One plan of rank 0; steps count from 0, the warm-up.
void follow_plan(const LoopParts& parts, uint64_t generation, uint64_t step, const ControlFrame& frame) {
  const auto* plan = std::get_if<StepPlan>(&frame);
  if (plan == nullptr)
    throw Error(Code::internal, cat("control link: a frame of kind ", frame.index() + 1, " came while serving"));
  if (plan->generation != generation || plan->step != step)
    throw Error(Code::internal, cat("plan of generation ", plan->generation, " step ", plan->step, ", expected ",
                                    generation, " step ", step));
  run_step(parts, *plan);
  parts.executor.poll();
  wire::Stats stats;
  stats.step = step;
  parts.controls.publish(stats);
}

/// True for a frame about the spill tier.
bool follow_spill(const LoopParts& parts, const ControlFrame& frame, const std::function<void(Fetched)>& answer) {
  if (std::holds_alternative<ForgetSpilledFrame>(frame)) {
    if (parts.spill != nullptr) parts.spill->store().clear();
    return true;
  }
  const auto* order = std::get_if<RestoreFrame>(&frame);
  if (order == nullptr) return false;
  if (parts.spill == nullptr)
    answer({order->restore, false});
  else
    parts.spill->fetch(order->restore, order->items, [answer, id = order->restore](bool ok) { answer({id, ok}); });
  return true;
}

}  // namespace

void follow(const LoopParts& parts, uint64_t generation, const std::function<void()>& ready) {
  Mailbox<FollowerEvent> mail;
  struct Shut {
    const LoopParts& parts;
    ~Shut() {
      if (parts.spill != nullptr) parts.spill->store().cancel_fetches();
      parts.group.shut();
    }
  } const shut{parts};
  parts.group.serve([&](ControlFrame f) { mail.push(std::move(f)); },
                    [&](const Error& e) {
                      mail.push(RankLost{e});
                      parts.comm.abort();
                    });
  uint64_t step = 0;
  MemoryLevel memory = MemoryLevel::ok;  // as told to rank 0
  auto watchdog = Clock::now();
  std::optional<Clock::time_point> give_up;
  for (;;) {
    // Asked to stop, this rank goes on until rank 0 has drained.
    if (parts.controls.stopping() && !give_up) give_up = Clock::now() + kDrainTime;
    if (give_up && Clock::now() >= *give_up) return;
    for (const FollowerEvent& event : mail.take()) {
      if (const auto* lost = std::get_if<RankLost>(&event)) {
        if (parts.controls.stopping()) return;
        throw lost->error;
      }
      if (const auto* fetched = std::get_if<Fetched>(&event)) {
        parts.group.tell_restored(fetched->restore, fetched->ok);
        continue;
      }
      const auto& frame = std::get<ControlFrame>(event);
      if (std::holds_alternative<StopFrame>(frame)) return;
      if (follow_spill(parts, frame, [&mail](Fetched f) { mail.push(f); })) continue;
      follow_plan(parts, generation, step, frame);
      if (step++ == 0) ready();
    }
    parts.controls.turned();
    if (step > 0 && memory != parts.controls.memory()) {
      memory = parts.controls.memory();
      parts.group.tell_memory(memory);
    }
    if (Clock::now() >= watchdog) {
      if (step > 0) parts.notifier.watchdog();
      watchdog = Clock::now() + kWatchdog;
    }
    mail.wait_until(watchdog);
  }
}

}  // namespace glm53
