// Finds a step that never ends: a kernel that hangs, a device that is gone, a lock nobody gives back.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "engine/runtime/plan.h"

namespace glm53 {

/// Calls `on_stall` once, on its own thread, when a step has run for longer than `limit`; it must not throw, and
/// usually ends the process: what hangs cannot be unwound. Between steps nothing is watched.
class StepWatchdog {
 public:
  StepWatchdog(std::chrono::milliseconds limit, std::function<void(uint64_t step)> on_stall);
  ~StepWatchdog();
  StepWatchdog(const StepWatchdog&) = delete;
  StepWatchdog& operator=(const StepWatchdog&) = delete;

  void begin(uint64_t step);
  void end();

 private:
  void loop();

  const std::chrono::milliseconds limit_;
  const std::function<void(uint64_t)> on_stall_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;                                          // guarded by mutex_
  uint64_t step_ = 0;                                              // guarded by mutex_
  std::optional<std::chrono::steady_clock::time_point> deadline_;  // guarded by mutex_; of the step that runs
  std::thread thread_;                                             // last: it uses all of the above
};

/// An executor whose steps are watched, but for step 0: the warm-up may take as long as loading may.
class WatchedExecutor final : public Executor {
 public:
  WatchedExecutor(Executor& inner, StepWatchdog& watchdog) : inner_(inner), watchdog_(watchdog) {}
  void submit(const StepPlan& plan) override;
  std::optional<StepResult> poll() override { return inner_.poll(); }

 private:
  Executor& inner_;
  StepWatchdog& watchdog_;
};

}  // namespace glm53
