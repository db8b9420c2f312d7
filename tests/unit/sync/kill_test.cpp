// kill -9 of the receiving process at random moments: the copy goes on, and ends with the same bytes.
#include <csignal>
#include <random>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/wait.h>

#include "tests/unit/sync/world.h"

using namespace glm53;
using namespace glm53::test;

TEST_CASE("kill -9 during a copy, five times") {
  SyncWorld w;
  std::minstd_rand random(7);
  int killed = 0;
  for (int round = 0; round < 5; ++round) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // Ends itself in the middle of a piece: nothing of it is cleaned up.
      const auto limit = static_cast<int64_t>(random() % 3 + 1);
      std::thread([&w, limit] {
        while (w.pieces < limit) std::this_thread::yield();
        ::kill(::getpid(), SIGKILL);
      }).detach();
      try {
        w.copy();
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    random();
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    killed += WIFSIGNALED(status) ? 1 : 0;
  }
  CHECK(killed > 0);
  w.copy();
  CHECK(w.whole());
}
