// kill -9 of the receiving process at random moments: the copy goes on, ends with the same bytes, and little travels
// twice.
#include <algorithm>
#include <csignal>
#include <new>
#include <random>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "common/process.h"
#include "tests/unit/sync/world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

/// A counter that outlives the processes that count.
class SharedCounter {
 public:
  SharedCounter() : page_(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    REQUIRE(page_ != MAP_FAILED);
    value_ = new (page_) std::atomic<int64_t>(0);
  }
  ~SharedCounter() { ::munmap(page_, kSize); }
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;
  std::atomic<int64_t>& operator*() { return *value_; }

 private:
  static constexpr size_t kSize = 4096;
  void* page_;
  std::atomic<int64_t>* value_ = nullptr;
};

/// How often in all: five times, or what GLM53_KILLS says.
int kills_wanted() {
  const auto given = environment("GLM53_KILLS");
  const auto number = given ? parse_int(*given) : std::nullopt;
  return number && *number > 0 ? static_cast<int>(*number) : 5;
}

/// One life of the receiver: it ends itself in the middle of whatever it does once `limit` bytes have come.
bool dies(SyncWorld& w, int64_t limit) {
  const int64_t until = *w.sent + limit;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::thread([&w, until] {
      while (*w.sent < until) std::this_thread::yield();
      ::kill(::getpid(), SIGKILL);  // nothing is cleaned up
    }).detach();
    try {
      w.copy();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status);
}

}  // namespace

TEST_CASE("kill -9 during a copy, five times and again: the same bytes, and few of them twice") {
  std::minstd_rand random(std::random_device{}());
  int left = kills_wanted();
  int64_t worst = 0;
  while (left > 0) {
    SyncWorld w;
    int64_t total = 0;
    for (const auto& [path, content] : w.files) {
      if (path.find("sub/") == std::string::npos) total += static_cast<int64_t>(content.size());
    }
    SharedCounter sent;
    w.sent = &*sent;
    int killed = 0;
    for (int life = 0; life < 5; ++life) killed += dies(w, 1 + static_cast<int64_t>(random() % 1'500'000)) ? 1 : 0;
    CHECK(killed > 0);
    left -= std::max(1, killed);
    w.copy();
    CHECK(w.whole());
    const int64_t again = *sent - total;
    worst = std::max(worst, again);
    // What a life loses is what each stream had on its way: a piece, and one not yet journaled.
    CHECK(again <= killed * w.from.streams * 2 * static_cast<int64_t>(sync::kPiece));
  }
  MESSAGE("most sent again in five kills: ", worst, " bytes");
}
