#include "engine/runtime/memory_guard.h"

#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include "common/error.h"
#include "common/file.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/runtime/memory_ledger.h"

namespace glm53 {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr std::array<milliseconds, 4> kHold = {milliseconds(0), milliseconds(5000), milliseconds(3000),
                                               milliseconds(2000)};
constexpr milliseconds kRecovery{5000};
constexpr double kStandstill = 50;  // percent of the time
constexpr size_t kLongPrompt = 2048;

MemoryLevel next(MemoryLevel level, int step) {
  return static_cast<MemoryLevel>(static_cast<int>(level) + step);
}

/// "full avg10=1.50 …" of a pressure file.
std::optional<double> full_pressure(const std::string& text) {
  for (const std::string& line : split(text, '\n')) {
    if (!line.starts_with("full ")) continue;
    for (const std::string& field : split(line, ' ')) {
      if (field.starts_with("avg10=")) return parse_double(std::string_view(field).substr(6));
    }
  }
  return std::nullopt;
}

}  // namespace

std::string_view name(MemoryLevel level) {
  constexpr std::array<std::string_view, 4> kNames = {"ok", "tight", "low", "critical"};
  return kNames.at(static_cast<size_t>(level));
}

MemoryReading read_memory(const std::string& proc) {
  MemoryReading reading;
  reading.available = available_memory(proc);
  try {
    reading.stalled = full_pressure(read_file(proc + "/pressure/memory", 1 << 16));
  } catch (const Error&) {
    // Kernels without pressure information have no such file.
  }
  return reading;
}

uint64_t MemoryThresholds::of(MemoryLevel level) const {
  switch (level) {
    case MemoryLevel::ok:
      break;
    case MemoryLevel::tight:
      return tight;
    case MemoryLevel::low:
      return low;
    case MemoryLevel::critical:
      return critical;
  }
  return 0;
}

MemoryThresholds memory_thresholds(uint64_t reserve) {
  return {reserve / 2, std::min(768 * kMiB, reserve / 4), std::min(410 * kMiB, reserve / 10)};
}

MemoryLevel MemoryPolicy::at(const MemoryReading& reading) const {
  if (reading.available < thresholds_.critical) return MemoryLevel::critical;
  if (reading.available < thresholds_.tight && reading.stalled.value_or(0) >= kStandstill) return MemoryLevel::critical;
  if (reading.available < thresholds_.low) return MemoryLevel::low;
  return reading.available < thresholds_.tight ? MemoryLevel::tight : MemoryLevel::ok;
}

MemoryLevel MemoryPolicy::update(const MemoryReading& reading, Time now) {
  const MemoryLevel seen = at(reading);
  MemoryLevel risen = MemoryLevel::ok;
  for (const MemoryLevel level : {MemoryLevel::tight, MemoryLevel::low, MemoryLevel::critical}) {
    const auto i = static_cast<size_t>(level);
    if (seen < level) {
      since_.at(i).reset();
      continue;
    }
    if (!since_.at(i)) since_.at(i) = now;
    if (now - *since_.at(i) >= kHold.at(i)) risen = level;
  }
  if (risen > level_) {
    level_ = risen;
    better_since_.reset();
    return level_;
  }
  const uint64_t threshold = thresholds_.of(level_);
  if (level_ == MemoryLevel::ok || seen >= level_ || reading.available < threshold + threshold / 4) {
    better_since_.reset();
    return level_;
  }
  if (!better_since_) better_since_ = now;
  if (now - *better_since_ >= kRecovery) {
    level_ = next(level_, -1);
    better_since_ = now;
  }
  return level_;
}

std::optional<size_t> longest_prompt(MemoryLevel level) {
  return level >= MemoryLevel::tight ? std::optional(kLongPrompt) : std::nullopt;
}

std::optional<std::string> memory_refusal(MemoryLevel level, size_t prompt_tokens) {
  if (level >= MemoryLevel::low) return "the server is short of memory; try again later";
  if (level == MemoryLevel::tight && prompt_tokens > kLongPrompt) {
    return cat("the server is short of memory: prompts of more than ", kLongPrompt,
               " tokens are not taken at the moment; try again later");
  }
  return std::nullopt;
}

void drop_page_cache(const std::string& dir) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    if (!entry.is_regular_file(error)) continue;
    const UniqueFd file(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) continue;
    if (const int result = ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED); result != 0)
      log::warn(cat("the page cache of ", entry.path().string(), " cannot be dropped (error ", result, ")"));
  }
  if (error) log::warn(cat("the page cache of ", dir, " cannot be dropped: ", error.message()));
}

void prefer_to_be_killed() {
  constexpr std::string_view kScore = "500";
  const UniqueFd file(::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  if (!file || ::write(file.get(), kScore.data(), kScore.size()) != static_cast<ssize_t>(kScore.size()))
    log::warn("oom_score_adj cannot be set: when memory runs out, the kernel may choose another process");
}

MemoryGuard::MemoryGuard(Options options, std::function<void(MemoryLevel, const MemoryReading&)> on_reading)
    : options_(std::move(options)), on_reading_(std::move(on_reading)), thread_([this] { loop(); }) {}

MemoryGuard::~MemoryGuard() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

void MemoryGuard::loop() {
  MemoryPolicy policy(options_.reserve);
  MemoryLevel told = MemoryLevel::ok;
  bool blind = false;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    try {
      const MemoryReading reading = read_memory(options_.proc);
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      const MemoryLevel level = policy.update(reading, std::chrono::duration_cast<milliseconds>(now));
      if (level != told) {
        log::warn(
            cat("memory: ", name(level), ", ", human_bytes(static_cast<int64_t>(reading.available)), " are available"));
        told = level;
      }
      on_reading_(level, reading);
      blind = false;
    } catch (const std::exception& e) {
      // The level stays as it was: not to know is no reason to refuse, nor to stop refusing.
      if (!blind) log::error(cat("the memory guard cannot read: ", std::string_view(e.what())));
      blind = true;
    }
    lock.lock();
    stop_.wait_for(lock, options_.period, [this] { return stopping_; });
  }
}

}  // namespace glm53
