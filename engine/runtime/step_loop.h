// The loops that turn steps: rank 0 schedules, the other ranks follow.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "common/rank_contract.h"
#include "engine/comm/communicator.h"
#include "engine/runtime/api_link.h"
#include "engine/runtime/mailbox.h"
#include "engine/runtime/memory_guard.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/rank_group.h"
#include "engine/runtime/scheduler.h"
#include "engine/runtime/spill_tier.h"
#include "engine/runtime/step_stages.h"

namespace glm53 {

/// What other threads (signals, admin socket) want of a loop, and what it shows them.
class Controls {
 public:
  void open_gate(bool open) {
    gate_ = open;
    wake();
  }
  void drain() {
    drain_ = true;
    wake();
  }
  /// Drain, then leave the loop.
  void stop() {
    stop_ = true;
    wake();
  }
  /// Once: forget the prefix cache.
  void reset_cache() {
    reset_cache_ = true;
    wake();
  }
  /// How this machine's memory stands (the memory guard).
  void set_memory(MemoryLevel level, uint64_t available) {
    available_ = available;
    if (memory_.exchange(level) != level) wake();
  }
  MemoryLevel memory() const { return memory_; }
  uint64_t memory_available() const { return available_; }
  bool gate() const { return gate_; }
  bool draining() const { return drain_ || stop_; }
  bool stopping() const { return stop_; }

  /// Whether that was asked for since the last call.
  bool take_cache_reset() { return reset_cache_.exchange(false); }
  /// The loop's side. `wake` runs on the calling thread of the functions above.
  void on_change(std::function<void()> wake);
  void publish(const wire::Stats& stats);
  /// The loop has turned.
  void turned();
  /// Last published, with the age of the last turn and the memory of now.
  wire::Stats stats() const;

 private:
  void wake();

  std::atomic<bool> gate_ = false, drain_ = false, stop_ = false, reset_cache_ = false;
  std::atomic<MemoryLevel> memory_ = MemoryLevel::ok;
  std::atomic<uint64_t> available_ = 0;
  std::atomic<std::chrono::steady_clock::rep> turned_ = 0;
  mutable std::mutex mutex_;
  std::function<void()> wake_;  // guarded by mutex_
  wire::Stats stats_;           // guarded by mutex_
};

struct LoopParts {
  RankGroup& group;
  Executor& executor;
  Communicator& comm;
  Notifier& notifier;
  Controls& controls;
  SpillTier* spill = nullptr;  ///< null when nothing is spilled
};

/// How long requests waited for their first step.
class QueueTimes {
 public:
  using Clock = std::chrono::steady_clock;
  void submitted(uint64_t id, Clock::time_point now) { of_[id] = {now, std::nullopt}; }
  void planned(const StepPlan& plan, Clock::time_point now);
  /// Fills in queue_ms, and forgets the request with its last delta.
  void stamp(wire::Delta& delta);
  void clear() { of_.clear(); }
  size_t size() const { return of_.size(); }

 private:
  struct Times {
    Clock::time_point submitted;
    std::optional<uint32_t> queue_ms;
  };
  std::unordered_map<uint64_t, Times> of_;
};

/// Rank 0. Connects to the API process, runs until stopped and drained, tells the other ranks. Throws Error(peer_lost)
/// when one goes away.
class StepLoop {
 public:
  StepLoop(const LoopParts& parts, Scheduler& scheduler, std::string api_socket, const wire::Hello& hello);
  /// `warm_up` (step 0) runs on every rank first; `ready` is called once, when the loop is about to turn.
  void run(const StepPlan& warm_up, const std::function<void()>& ready);

 private:
  using Clock = std::chrono::steady_clock;
  struct Wake {};
  struct Lost {
    Error error;
  };
  using Event = std::variant<Wake, Lost, ApiEvent, MemoryFrame, RestoredFrame>;

  void turn(ApiLink& api);
  void handle(const Event& event);
  void handle_api(const ApiEvent& event);
  void receive(uint64_t connection, const wire::Message& message);
  void submit(const wire::Submit& request);
  MemoryLevel memory() const;
  void apply_controls();
  bool step();
  void order_restores();
  void restored(const RestoredFrame& answer);
  void deliver(ApiLink& api);
  void report(ApiLink& api);
  Clock::time_point next_report() const;

  LoopParts parts_;
  Scheduler& scheduler_;
  const std::string api_socket_;
  const wire::Hello hello_;
  Mailbox<Event> mail_;
  uint64_t connection_ = 0;            // of the API process; 0 = none
  std::map<int, MemoryLevel> memory_;  // of the other ranks
  struct Answers {
    int missing = 0;
    bool ok = true;
  };
  std::map<uint64_t, Answers> answers_;  // to restores that were ordered
  std::vector<wire::Delta> refused_;     // to be sent
  QueueTimes queue_times_;
  StepTimes times_;
  bool drained_ = false;        // the scheduler has been told
  wire::Stats last_;            // as sent
  bool stats_changed_ = false;  // since then
  Clock::time_point stats_sent_{}, watchdog_sent_{};
};

/// The other ranks: run the plans of rank 0 in order until it says stop. Returns when told so, or when rank 0 ends
/// after controls.stop(). `ready` is called after the first plan, the warm-up.
void follow(const LoopParts& parts, uint64_t generation, const std::function<void()>& ready);

}  // namespace glm53
