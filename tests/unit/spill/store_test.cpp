#include <csignal>
#include <fcntl.h>
#include <future>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/wait.h>

#include "common/log.h"
#include "common/strings.h"
#include "engine/spill/spill_store.h"
#include "tests/temp_dir.h"
#include "tests/unit/spill/faulty.h"

using namespace glm53;
using namespace glm53::spill;
using namespace glm53::spill::test;
using namespace std::chrono_literals;
using glm53::test::TempDir;

namespace {

constexpr size_t kPayload = 1000;

StoreOptions options_of(const std::string& dir, uint64_t memory, uint64_t disk) {
  StoreOptions o;
  o.memory_bytes = memory;
  o.disk = disk_options(dir, disk, kPayload);
  return o;
}

void put(Store& store, int number) {
  store.put(meta_of(number), payload_of(number, kPayload));
}

Fetched fetch(Store& store, std::vector<Meta> wanted) {
  std::promise<Fetched> done;
  store.fetch(std::move(wanted), [&](Fetched f) { done.set_value(std::move(f)); });
  return done.get_future().get();
}

bool fetches(Store& store, int number) {
  const Fetched f = fetch(store, {meta_of(number)});
  if (f.payloads.empty()) return false;
  CHECK(*f.payloads.at(0) == payload_of(number, kPayload));
  return true;
}

/// What is written to the log while it lives.
class LogOf {
 public:
  explicit LogOf(std::string path) : path_(std::move(path)), saved_(::dup(STDERR_FILENO)) {
    const UniqueFd file(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    REQUIRE(::dup2(file.get(), STDERR_FILENO) >= 0);
    log::init("test", log::Level::info);
  }
  LogOf(const LogOf&) = delete;
  LogOf& operator=(const LogOf&) = delete;
  ~LogOf() { ::dup2(saved_.get(), STDERR_FILENO); }
  int count(const std::string& text) const {
    int n = 0;
    const std::string all = read_file(path_);
    for (size_t at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++n;
    return n;
  }

 private:
  std::string path_;
  UniqueFd saved_;
};

}  // namespace

TEST_CASE("spill tier: memory alone, bounded, least recently used first out") {
  Store store(options_of("", 10 * kPayload, 0));
  for (int i = 0; i < 10; ++i) put(store, i);
  CHECK(fetches(store, 0));  // used: 1 is the oldest now
  put(store, 10);
  CHECK(store.has(meta_of(0).name));
  CHECK_FALSE(store.has(meta_of(1).name));
  CHECK(store.wants(meta_of(1).name));
  CHECK_FALSE(store.wants(meta_of(10).name));
  CHECK(store.cls_of(meta_of(10).name) == 0);
  CHECK_FALSE(store.cls_of(meta_of(1).name));
  CHECK_FALSE(fetches(store, 1));
  const StoreStats s = store.stats();
  CHECK(s.memory_records == 10);
  CHECK(s.memory_bytes == 10 * kPayload);
  CHECK(s.put == 11);
  CHECK(s.missing == 1);
  store.put(meta_of(11), payload_of(11, 11 * kPayload));  // larger than all of it
  CHECK(store.stats().dropped == 1);
  store.clear();
  CHECK_FALSE(store.has(meta_of(0).name));
  CHECK(store.stats().memory_bytes == 0);
}

TEST_CASE("spill tier: what memory has no room for comes from disk, also after a restart") {
  TempDir dir;
  {
    Store store(options_of(dir.path(), 3 * kPayload, 1 << 20));
    for (int i = 0; i < 20; ++i) put(store, i);
    store.settle();
    const StoreStats s = store.stats();
    CHECK(s.memory_bytes <= 3 * kPayload);
    CHECK(s.disk_records == s.written);
    CHECK(s.disk_ok);
    for (int i = 0; i < 20; ++i) CHECK(fetches(store, i));
  }
  Store store(options_of(dir.path(), 0, 1 << 20));
  store.settle();
  CHECK(store.stats().disk_records == 20);
  CHECK(store.stats().memory_records == 0);
  for (int i = 0; i < 20; ++i) CHECK(fetches(store, i));
  store.clear();
  CHECK_FALSE(store.has(meta_of(3).name));
  store.settle();
  CHECK(store.stats().disk_bytes == 0);
}

TEST_CASE("spill tier: a fetch gives all or nothing, and never other tokens") {
  TempDir dir;
  Store store(options_of(dir.path(), 100 * kPayload, 1 << 20));
  for (int i = 0; i < 4; ++i) put(store, i);
  CHECK(fetch(store, {meta_of(0), meta_of(1), meta_of(2)}).payloads.size() == 3);
  const Fetched some = fetch(store, {meta_of(0), meta_of(9), meta_of(2)});
  CHECK(some.payloads.empty());
  REQUIRE(some.missing.size() == 1);
  CHECK(some.missing[0] == meta_of(9).name);
  // Two prefixes of the same name, as if their hashes collided.
  Meta other = meta_of(3);
  other.tokens[5] = 12345;
  CHECK(fetch(store, {other}).payloads.empty());
  CHECK_FALSE(store.has(other.name));
  other = meta_of(2);
  other.position += 64;
  CHECK(fetch(store, {other}).payloads.empty());
}

TEST_CASE("spill tier: a full disk pauses writing with one line in the log, and memory serves on") {
  TempDir dir;
  Faulty ops;
  auto options = options_of(dir.path(), 5 * kPayload, 1 << 20);
  SUBCASE("full") {
    ops.write_error = ENOSPC;
  }
  SUBCASE("broken") {
    ops.write_error = EIO;
  }
  options.pause = 0ms;
  const LogOf log(dir / "log");
  {
    Store store(options, ops);
    put(store, 0);
    store.settle();
    CHECK(store.stats().disk_records == 1);
    ops.room = 0;
    for (int i = 1; i < 30; ++i) put(store, i);
    // Every try fails, as often as it likes to; what was put last can be had.
    while (store.stats().failures < 3) std::this_thread::yield();
    CHECK(fetches(store, 29));
    CHECK_FALSE(store.stats().disk_ok);
    CHECK(store.stats().disk_records == 1);
    ops.room = 1 << 20;
    put(store, 31);
    store.settle();
    CHECK(store.stats().disk_ok);
    CHECK(store.stats().written > 1);
    CHECK(log.count("writing to disk pauses") == 1);
    CHECK(log.count("writing to disk goes on") == 1);
  }
  Store store(options_of(dir.path(), 0, 1 << 20));
  store.settle();
  CHECK(fetches(store, 0));
  CHECK(fetches(store, 31));
}

TEST_CASE("spill tier: while writing pauses nothing is queued for it") {
  TempDir dir;
  Faulty ops;
  auto options = options_of(dir.path(), 0, 1 << 20);
  options.pause = 1h;
  Store store(options, ops);
  store.settle();
  ops.room = 0;
  put(store, 0);
  store.settle();
  CHECK(store.stats().failures == 1);
  for (int i = 1; i < 30; ++i) put(store, i);
  CHECK(store.stats().memory_bytes == 0);
  CHECK(store.stats().dropped == 29);
}

TEST_CASE("spill tier: a folder that is taken costs the disk, not the service") {
  TempDir dir;
  const auto options = options_of(dir.path(), 5 * kPayload, 1 << 20);
  const Disk taken(options.disk);
  const LogOf log(dir / "log");
  Store store(options);
  store.settle();
  put(store, 1);
  CHECK(fetches(store, 1));
  CHECK_FALSE(store.stats().disk_ok);
  CHECK(log.count("nothing is kept on disk") == 1);
  CHECK_THROWS_AS(Store(options_of(dir / "b", 0, 100)), Error);
}

TEST_CASE("spill tier: kill -9 at any moment loses nothing that was reported written") {
  for (int round = 0; round < 10; ++round) {
    TempDir dir;
    std::array<int, 2> pipe{};
    REQUIRE(::pipe2(pipe.data(), O_CLOEXEC) == 0);
    UniqueFd from(pipe[0]), to(pipe[1]);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      Store store(options_of(dir.path(), 0, 1 << 20));
      store.settle();
      for (int i = 0;; ++i) {
        put(store, i);
        store.settle();
        if (::write(to.get(), &i, sizeof i) != sizeof i) ::_exit(1);
      }
    }
    to.reset();
    int last = 0;
    for (int i = 0; i < 5 + 3 * round; ++i) REQUIRE(::read(from.get(), &last, sizeof last) == sizeof last);
    REQUIRE(::kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    while (::read(from.get(), &last, sizeof last) == sizeof last) {
    }
    Store store(options_of(dir.path(), 0, 1 << 20));
    store.settle();
    for (int i = 0; i <= last; ++i) CHECK(fetches(store, i));
    CHECK(store.stats().damaged == 0);
  }
}
