// The wall clock jumps: deadlines are moments of it, everything else counts time that passed.
#include <random>

#include <doctest/doctest.h>

#include "world.h"

using namespace glm53;
using namespace glm53::test;
using std::chrono::hours;
using std::chrono::seconds;

namespace {

wire::Submit of_class(uint64_t id, int32_t priority, size_t prompt, int32_t tokens) {
  wire::Submit r = make_request(id, prompt, tokens);
  r.priority = priority;
  return r;
}

bool ended(const World& w, uint64_t id) {
  return !w.seen.at(id).finish.empty();
}

/// Turns until one of the two has ended; which.
uint64_t first_of(World& w, uint64_t a, uint64_t b) {
  for (int i = 0; i < 10000; ++i) {
    if (ended(w, a)) return a;
    if (ended(w, b)) return b;
    w.turn();
  }
  return 0;
}

}  // namespace

TEST_CASE("clock jumps: hours ahead and back age nobody by more than the longest gap between two steps") {
  SchedulerLimits l = limits_of(1, 1024);
  l.aging = seconds(60);
  World w(l);
  w.now = hours(1000);
  w.submit(of_class(1, 0, 64, 20));
  w.turn();
  w.submit(of_class(2, 1, 64, 3));  // waits
  for (const auto jump : {hours(50), -hours(90), hours(3), -hours(700)}) {
    w.now += jump;
    w.turn();
  }
  w.submit(of_class(3, 0, 64, 3));  // of a better class, and the other one has not waited long
  CHECK(first_of(w, 2, 3) == 3);
  w.run_dry();
  CHECK(w.seen[2].output == oracle(of_class(2, 1, 64, 3)).output);
}

TEST_CASE("clock jumps: what was waited before a jump back still counts") {
  SchedulerLimits l = limits_of(1, 1024);
  l.aging = seconds(60);
  World w(l);
  w.now = hours(1000);
  w.submit(of_class(1, 0, 64, 60));
  w.turn();
  w.submit(of_class(2, 1, 64, 3));
  for (int i = 0; i < 26; ++i) {  // more than two minutes, in the middle of which the clock goes back by a day
    w.now += seconds(5);
    if (i == 13) w.now -= hours(24);
    w.turn();
  }
  REQUIRE_FALSE(ended(w, 1));
  w.submit(of_class(3, 0, 64, 3));
  CHECK(first_of(w, 2, 3) == 2);
  w.run_dry();
}

TEST_CASE("clock jumps: a low class is not starved by a high one that keeps coming") {
  SchedulerLimits l = limits_of(1, 1024);
  l.aging = seconds(60);
  World w(l);
  w.now = hours(1000);
  std::mt19937_64 random(7);
  uint64_t next = 2;
  w.submit(of_class(next++, 0, 64, 8));
  w.turn();
  w.submit(of_class(1, 3, 64, 8));
  int turns = 0;
  while (!ended(w, 1) && ++turns < 2000) {
    // A clock that is set to and fro, and runs in between.
    const auto far = seconds(static_cast<int64_t>(random() % 200000)) - seconds(100000);
    w.now += turns % 2 == 0 ? far : Scheduler::Time(seconds(1));
    if (w.scheduler.stats().waiting < 2) w.submit(of_class(next++, 0, 64, 8));
    w.turn();
  }
  CHECK(ended(w, 1));
  CHECK(next > 10);  // they did keep coming
  CHECK(w.seen[1].output == oracle(of_class(1, 3, 64, 8)).output);
  w.run_dry();
}

TEST_CASE("clock jumps: who is passed over becomes first by time that passed, not by a clock that was set") {
  SchedulerLimits l = limits_of(2, 640);
  l.patience = seconds(120);
  World w(l);
  w.now = hours(1000);
  w.submit(make_request(1, 300, 200));  // 8 of 10 blocks
  w.turn();
  w.submit(make_request(2, 300, 100));  // has to wait for them
  w.now += hours(5);                    // counts as one long gap
  w.turn();
  w.now -= hours(5);
  w.turn();
  w.submit(make_request(3, 40, 5));  // still overtakes
  w.turn();
  CHECK(w.scheduler.stats().running == 2);
  while (!ended(w, 3)) w.turn();
  for (int i = 0; i < 25; ++i) {
    w.now += seconds(5);
    w.turn();
  }
  REQUIRE_FALSE(ended(w, 1));
  w.submit(make_request(4, 40, 5));
  w.turn();
  CHECK(w.scheduler.stats().running == 1);  // nobody overtakes 2 any more
  w.run_dry();
  for (const uint64_t id : {1, 2, 3, 4}) CHECK(w.seen[id].finish == "length");
}

TEST_CASE("clock jumps: a deadline is a moment of the wall clock, and ends its own request only") {
  World w(limits_of(2, 1024));
  w.now = hours(1000);
  wire::Submit hurried = make_request(1, 64, 100);
  hurried.deadline_ms = (w.now + seconds(30)).count();
  w.submit(hurried);
  w.submit(make_request(2, 64, 100));
  wire::Submit waits = make_request(3, 64, 5);  // in the queue, with the same deadline
  waits.deadline_ms = hurried.deadline_ms;
  w.submit(waits);
  for (int i = 0; i < 5; ++i) w.turn();
  w.now -= hours(2);  // the deadline is further away now
  for (int i = 0; i < 5; ++i) w.turn();
  CHECK_FALSE(ended(w, 1));
  w.now += hours(4);
  w.turn();
  CHECK(w.seen[1].code == 504);
  CHECK(w.seen[3].code == 504);
  w.now -= hours(4);  // what has ended stays ended
  w.run_dry();
  CHECK(w.seen[2].output == oracle(make_request(2, 64, 100)).output);
  CHECK(w.seen[2].finish == "length");
}

TEST_CASE("clock jumps: a crowd under a clock that is set at every step ends as under a steady one") {
  SchedulerLimits l = caching(4, 1280, 6);
  l.aging = seconds(20);
  l.patience = seconds(40);
  World w(l);
  w.now = hours(1000);
  std::mt19937_64 random(11);
  std::vector<wire::Submit> crowd;
  for (uint64_t id = 1; id <= 120; ++id) {
    wire::Submit r =
        of_class(id, static_cast<int32_t>(random() % 4), 20 + random() % 200, 1 + static_cast<int32_t>(random() % 30));
    r.key = random() % 2 == 0 ? "a" : "b";
    crowd.push_back(r);
  }
  size_t sent = 0;
  for (int i = 0; i < 100000 && (sent < crowd.size() || !w.scheduler.idle()); ++i) {
    w.now += seconds(static_cast<int64_t>(random() % 400000)) - seconds(200000);
    if (sent < crowd.size() && random() % 3 == 0) w.submit(crowd[sent++]);
    w.turn();
  }
  w.run_dry();
  for (const wire::Submit& r : crowd) {
    const Expected e = oracle(r);
    CAPTURE(r.id);
    CHECK(w.seen[r.id].output == e.output);
    CHECK(w.seen[r.id].finish == e.finish);
  }
}
