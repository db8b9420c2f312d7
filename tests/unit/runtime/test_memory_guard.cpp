// The memory guard: thresholds, the decision over time, the files it reads, its thread.
#include <condition_variable>
#include <mutex>
#include <unistd.h>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/runtime/memory_guard.h"
#include "engine/runtime/rank_group.h"
#include "tests/temp_dir.h"

using namespace glm53;
using std::chrono::milliseconds;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20, kGiB = kMiB << 10;

/// A redirected /proc.
struct Proc {
  Proc() { make_dirs(path + "/pressure"); }
  void available(uint64_t bytes) const {
    write_file(path + "/meminfo", cat("MemTotal:       127000000 kB\nMemFree:  1 kB\nMemAvailable:   ", bytes / 1024,
                                      " kB\nBuffers: 5 kB\n"));
  }
  void pressure(std::string_view full) const {
    write_file(path + "/pressure/memory",
               cat("some avg10=99.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=", full, " avg60=0.00 total=2\n"));
  }
  test::TempDir folder;
  const std::string& path = folder.path();
};

MemoryReading reading(uint64_t mib, std::optional<double> stalled = std::nullopt) {
  return {mib * kMiB, stalled};
}

/// A policy with a reserve of 4 GiB: tight below 2048 MiB, low below 768, critical below 409.6; asked every 250 ms.
struct Timeline {
  MemoryPolicy policy{4 * kGiB};
  milliseconds now{1000000};
  MemoryLevel stay(uint64_t mib, milliseconds time, std::optional<double> stalled = std::nullopt) {
    for (const milliseconds end = now + time; now < end; now += milliseconds(250))
      policy.update(reading(mib, stalled), now);
    return policy.level();
  }
};

}  // namespace

TEST_CASE("thresholds follow the reserve and are capped") {
  const MemoryThresholds large = memory_thresholds(8 * kGiB);
  CHECK(large.tight == 4 * kGiB);
  CHECK(large.low == 768 * kMiB);
  CHECK(large.critical == 410 * kMiB);
  const MemoryThresholds small = memory_thresholds(kGiB);
  CHECK(small.tight == 512 * kMiB);
  CHECK(small.low == 256 * kMiB);
  CHECK(small.critical == kGiB / 10);
}

TEST_CASE("a level begins when it has held, worse ones sooner, and a dip does nothing") {
  Timeline t;
  CHECK(t.stay(2000, milliseconds(4750)) == MemoryLevel::ok);
  CHECK(t.stay(2100, milliseconds(250)) == MemoryLevel::ok);  // the dip is over: the count begins anew
  CHECK(t.stay(2000, milliseconds(5000)) == MemoryLevel::ok);
  CHECK(t.stay(2000, milliseconds(500)) == MemoryLevel::tight);
  CHECK(t.stay(700, milliseconds(2750)) == MemoryLevel::tight);
  CHECK(t.stay(700, milliseconds(500)) == MemoryLevel::low);
  CHECK(t.stay(300, milliseconds(2000)) == MemoryLevel::low);
  CHECK(t.stay(300, milliseconds(250)) == MemoryLevel::critical);

  Timeline sudden;  // straight from ok
  CHECK(sudden.stay(100, milliseconds(2000)) == MemoryLevel::ok);
  CHECK(sudden.stay(100, milliseconds(250)) == MemoryLevel::critical);
}

TEST_CASE("a level is left one step at a time, with room to spare and after a while") {
  Timeline t;
  CHECK(t.stay(700, milliseconds(4000)) == MemoryLevel::low);
  CHECK(t.stay(900, milliseconds(60000)) == MemoryLevel::low);  // better, but not by a quarter
  CHECK(t.stay(1000, milliseconds(5000)) == MemoryLevel::low);
  CHECK(t.stay(1000, milliseconds(250)) == MemoryLevel::tight);
  CHECK(t.stay(2300, milliseconds(60000)) == MemoryLevel::tight);
  CHECK(t.stay(4000, milliseconds(5250)) == MemoryLevel::ok);
  CHECK(t.stay(700, milliseconds(2750)) == MemoryLevel::ok);  // and it can begin again
  CHECK(t.stay(700, milliseconds(500)) == MemoryLevel::low);
}

TEST_CASE("standing still counts as critical only when memory is tight too") {
  Timeline roomy;
  CHECK(roomy.stay(50000, milliseconds(60000), 90) == MemoryLevel::ok);
  Timeline tight;
  CHECK(tight.stay(1500, milliseconds(2250), 49.9) == MemoryLevel::ok);
  CHECK(tight.stay(1500, milliseconds(2250), 50) == MemoryLevel::critical);
}

TEST_CASE("long prompts are refused first, then everything") {
  CHECK_FALSE(memory_refusal(MemoryLevel::ok, 1000000));
  CHECK_FALSE(memory_refusal(MemoryLevel::tight, 2048));
  CHECK(memory_refusal(MemoryLevel::tight, 2049));
  CHECK(memory_refusal(MemoryLevel::low, 1));
  CHECK(memory_refusal(MemoryLevel::critical, 1));
}

TEST_CASE("what waits and is long does not start while memory is short") {
  CHECK(longest_prompt(MemoryLevel::ok) == std::nullopt);
  CHECK(longest_prompt(MemoryLevel::tight) == 2048);
  CHECK(longest_prompt(MemoryLevel::low) == 2048);
}

TEST_CASE("readings come from the files, with and without pressure information") {
  const Proc proc;
  CHECK_THROWS_AS(read_memory(proc.path), Error);
  proc.available(5 * kGiB);
  CHECK(read_memory(proc.path).available == 5 * kGiB);
  CHECK_FALSE(read_memory(proc.path).stalled);
  proc.pressure("12.50");
  CHECK(read_memory(proc.path).stalled == 12.5);
  write_file(proc.path + "/meminfo", "MemTotal: 5 kB\n");
  CHECK_THROWS_AS(read_memory(proc.path), Error);
  CHECK(read_memory("/proc").available > 0);
}

TEST_CASE("the guard's thread tells what it reads and survives a file that goes away") {
  const Proc proc;
  proc.available(7 * kGiB);
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t last = 0;  // guarded by mutex
  const auto wait_for = [&](uint64_t bytes) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(20), [&] { return last == bytes; });
  };
  MemoryGuard guard({proc.path, kGiB, milliseconds(1)}, [&](MemoryLevel level, const MemoryReading& r) {
    CHECK(level == MemoryLevel::ok);
    {
      const std::lock_guard lock(mutex);
      last = r.available;
    }
    changed.notify_all();
  });
  CHECK(wait_for(7 * kGiB));
  REQUIRE(::unlink((proc.path + "/meminfo").c_str()) == 0);
  proc.available(6 * kGiB);
  CHECK(wait_for(6 * kGiB));
}

TEST_CASE("the page cache of a folder that is not there is nobody's problem") {
  drop_page_cache("/nowhere/at/all");
  const Proc proc;
  proc.available(kGiB);
  drop_page_cache(proc.path);
  CHECK(read_memory(proc.path).available == kGiB);
}

TEST_CASE("a follower's memory level travels in a frame; others are refused") {
  const auto frame = encode(ControlFrame(MemoryFrame{1, MemoryLevel::low}));
  const auto back = std::get<MemoryFrame>(decode_control(frame));
  CHECK(back.rank == 1);
  CHECK(back.level == MemoryLevel::low);
  auto wrong = frame;
  wrong.back() = std::byte{4};
  CHECK_THROWS_AS(decode_control(wrong), Error);
  for (size_t n = 0; n < frame.size(); ++n) CHECK_THROWS_AS(decode_control(std::span(frame).first(n)), Error);
}
