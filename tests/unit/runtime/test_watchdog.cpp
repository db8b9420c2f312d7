// A step that never ends is found; one that ends is not.
#include <atomic>
#include <future>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/runtime/step_watchdog.h"

using namespace glm53;
using std::chrono::hours;
using std::chrono::milliseconds;

namespace {

/// Runs what it is given.
class Scripted final : public Executor {
 public:
  explicit Scripted(std::function<void(const StepPlan&)> body) : body_(std::move(body)) {}
  void submit(const StepPlan& plan) override { body_(plan); }
  std::optional<StepResult> poll() override { return StepResult{.step = 5, .seqs = {}, .device_ms = 1, .stages = {}}; }

 private:
  std::function<void(const StepPlan&)> body_;
};

StepPlan step(uint64_t number) {
  StepPlan plan;
  plan.step = number;
  return plan;
}

}  // namespace

TEST_CASE("a step that does not end is reported, with its number") {
  std::promise<uint64_t> stalled;
  std::future<uint64_t> number = stalled.get_future();
  StepWatchdog watchdog(milliseconds(20), [&](uint64_t n) { stalled.set_value(n); });
  Scripted stuck([&](const StepPlan&) { number.wait(); });  // it hangs until somebody finds it
  WatchedExecutor executor(stuck, watchdog);
  executor.submit(step(9));
  CHECK(number.get() == 9);
  CHECK(rank_exit(Code::stalled) == 71);
}

TEST_CASE("steps that end, errors, idle time and the warm-up are nobody's stall") {
  std::atomic<int> stalls = 0;
  {
    StepWatchdog watchdog(hours(1), [&](uint64_t) { ++stalls; });
    Scripted fails([](const StepPlan& plan) {
      if (plan.step == 3) throw Error(Code::internal, "no");
    });
    WatchedExecutor executor(fails, watchdog);
    for (uint64_t n = 0; n < 3; ++n) executor.submit(step(n));
    CHECK_THROWS_AS(executor.submit(step(3)), Error);
    CHECK(executor.poll()->step == 5);
  }
  {
    StepWatchdog watchdog(milliseconds(1), [&](uint64_t) { ++stalls; });
    std::promise<void> never;
    Scripted slow([&](const StepPlan&) { never.get_future().wait_for(milliseconds(30)); });
    WatchedExecutor(slow, watchdog).submit(step(0));  // longer than the limit
  }
  CHECK(stalls == 0);
}
