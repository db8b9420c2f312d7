// Watches the machine's memory while serving and sheds load before the machine suffers: where processor and accelerator
// share one memory, running out of it hangs the machine instead of ending a program.
//
// What is shed, in this order (docs/operating.md says the same to operators). Thresholds are of MemAvailable and follow
// memory.reserve; a level must hold for a while, so that one dip sheds nothing:
//
//   tight     below reserve / 2                    for 5 s  new prompts of more than 2048 tokens are refused (503), and
//                                                           those that wait go on waiting
//   low       below min(0.75 GiB, reserve / 4)     for 3 s  every new request is refused (503), and the page cache of
//   the
//                                                           checkpoint is given back
//   critical  below min(0.4 GiB, reserve / 10)     for 2 s  the rank ends (exit 66): weights and pools are free at
//   once,
//             or tight while every task stands still        clients are replayed by the next generation
//
// A level is left one step at a time, when a quarter more than its threshold has been available for 5 s. Requests that
// run, replayed ones and canaries are never refused. The prefix cache is not emptied: its pools were allocated at the
// start, so the machine would gain nothing.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace glm53 {

enum class MemoryLevel : uint8_t { ok, tight, low, critical };
/// "ok", "tight", "low", "critical".
std::string_view name(MemoryLevel level);

struct MemoryReading {
  uint64_t available = 0;         ///< MemAvailable, bytes
  std::optional<double> stalled;  ///< percent of the last 10 s in which all tasks waited for memory; nothing: not told
};
/// From meminfo and pressure/memory under `proc`. Throws Error when there is no MemAvailable.
MemoryReading read_memory(const std::string& proc);

/// MemAvailable below which a level begins.
struct MemoryThresholds {
  uint64_t tight = 0, low = 0, critical = 0;
  uint64_t of(MemoryLevel level) const;
};
MemoryThresholds memory_thresholds(uint64_t reserve);

/// The decision: pure, no clock.
class MemoryPolicy {
 public:
  using Time = std::chrono::milliseconds;

  explicit MemoryPolicy(uint64_t reserve) : thresholds_(memory_thresholds(reserve)) {}
  /// A reading at `now`, which never goes back.
  MemoryLevel update(const MemoryReading& reading, Time now);
  MemoryLevel level() const { return level_; }

 private:
  MemoryLevel at(const MemoryReading& reading) const;

  const MemoryThresholds thresholds_;
  MemoryLevel level_ = MemoryLevel::ok;
  std::array<std::optional<Time>, 4> since_;  // by level: readings have been so bad, or worse, since then
  std::optional<Time> better_since_;
};

/// Most prompt tokens of a request that is taken, or that waits and may start; nothing when there is no such limit.
std::optional<size_t> longest_prompt(MemoryLevel level);
/// Why a request must not be taken; nothing when it may.
std::optional<std::string> memory_refusal(MemoryLevel level, size_t prompt_tokens);

/// Gives the page cache of a folder's files back to the machine; what cannot be opened is left as it is.
void drop_page_cache(const std::string& dir);
/// Makes this process the kernel's first choice when memory runs out all the same.
void prefer_to_be_killed();

/// Reads every 250 ms in a thread of its own.
class MemoryGuard {
 public:
  struct Options {
    std::string proc = "/proc";
    uint64_t reserve = 0;
    std::chrono::milliseconds period{250};
  };
  /// `on_reading` runs on the guard's thread, after each reading, with the level then; it must not throw.
  MemoryGuard(Options options, std::function<void(MemoryLevel, const MemoryReading&)> on_reading);
  ~MemoryGuard();
  MemoryGuard(const MemoryGuard&) = delete;
  MemoryGuard& operator=(const MemoryGuard&) = delete;

 private:
  void loop();

  const Options options_;
  const std::function<void(MemoryLevel, const MemoryReading&)> on_reading_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;     // last: it uses all of the above
};

}  // namespace glm53
