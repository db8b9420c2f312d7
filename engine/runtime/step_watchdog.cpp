#include "engine/runtime/step_watchdog.h"

#include <utility>

namespace glm53 {

using Clock = std::chrono::steady_clock;

StepWatchdog::StepWatchdog(std::chrono::milliseconds limit, std::function<void(uint64_t step)> on_stall)
    : limit_(limit), on_stall_(std::move(on_stall)), thread_([this] { loop(); }) {}

StepWatchdog::~StepWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepWatchdog::begin(uint64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  deadline_ = Clock::now() + limit_;
  // The thread sleeps until some deadline; it looks at this one when it wakes, which is not later.
}

void StepWatchdog::end() {
  const std::lock_guard lock(mutex_);
  deadline_.reset();
}

void StepWatchdog::loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto now = Clock::now();
    if (deadline_ && now >= *deadline_) {
      const uint64_t step = step_;
      lock.unlock();
      on_stall_(step);
      return;
    }
    changed_.wait_until(lock, deadline_.value_or(now + limit_));
  }
}

void WatchedExecutor::submit(const StepPlan& plan) {
  if (plan.step == 0) return inner_.submit(plan);
  struct Watch {
    StepWatchdog& watchdog;
    ~Watch() { watchdog.end(); }
  };
  watchdog_.begin(plan.step);
  const Watch watch{watchdog_};
  inner_.submit(plan);
}

}  // namespace glm53
