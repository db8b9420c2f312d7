// Rules about restarts.
#include "agent/reconcile/policy.h"

#include <vector>

#include <doctest/doctest.h>

using namespace glm53;
using namespace glm53::reconcile;
using namespace std::chrono_literals;

namespace {

const Time kStart{std::chrono::hours(1000)};

PastEnd end(Ms after, Cause cause = Cause::killed, int code = 0, Ms up_for = 0ms) {
  return {1, kStart + after, cause, code, up_for, "reason"};
}

ObservedProcess ended(int rank, std::optional<int> code, int signal, Ms at, bool asked = false) {
  ObservedProcess p;
  p.rank = rank;
  p.stop_requested = asked;
  p.end = ProcessEnd{code, signal, kStart + at};
  return p;
}

}  // namespace

TEST_CASE("the ladder of delays") {
  CHECK(restart_delay(1) == 0s);
  CHECK(restart_delay(2) == 30s);
  CHECK(restart_delay(3) == 2min);
  CHECK(restart_delay(4) == 10min);
  CHECK(restart_delay(40) == 10min);
}

TEST_CASE("judging the history") {
  struct Row {
    const char* what;
    std::vector<PastEnd> ends;
    bool blocked;
    std::optional<Ms> not_before;  // since kStart
    bool automatic;
  };
  const std::vector<Row> rows{
      {"nothing ended", {}, false, {}, false},
      {"first kill: at once", {end(0s)}, false, {}, true},
      {"second: 30 s", {end(0s), end(60s)}, false, 90s, true},
      {"third: 2 min", {end(0s), end(60s), end(120s)}, false, 240s, true},
      {"fourth within an hour: blocked", {end(0s), end(60s), end(120s), end(300s)}, true, {}, true},
      {"fourth, spread over hours: 10 min", {end(0s), end(50min), end(100min), end(150min)}, false, 160min, true},
      {"config: blocked at once", {end(0s, Cause::exited, 64)}, true, {}, true},
      {"weights: blocked at once", {end(0s, Cause::exited, 65)}, true, {}, true},
      {"memory: restarted", {end(0s, Cause::exited, 66)}, false, {}, true},
      {"fabric twice: 30 s", {end(0s, Cause::exited, 67), end(60s, Cause::exited, 67)}, false, 90s, true},
      {"peer lost twice: still at once", {end(0s, Cause::exited, 68), end(60s, Cause::exited, 68)}, false, {}, true},
      {"device", {end(0s, Cause::exited, 69)}, false, {}, true},
      {"internal", {end(0s, Cause::exited, 70)}, false, {}, true},
      {"stalled", {end(0s, Cause::stalled, 71)}, false, {}, true},
      {"exit 0 nobody asked for", {end(0s, Cause::exited, 0)}, false, {}, true},
      {"one canary: again", {end(0s, Cause::canary)}, false, {}, true},
      {"canary twice: blocked", {end(0s, Cause::canary), end(60s, Cause::canary)}, true, {}, true},
      {"canary, kill, canary: not in a row",
       {end(0s, Cause::canary), end(10s), end(60s, Cause::canary)},
       false,
       180s,
       true},
      {"stops by request do not count", {end(0s, Cause::requested), end(5s, Cause::requested)}, false, {}, false},
      {"a request between failures does not count", {end(0s), end(5s, Cause::requested), end(60s)}, false, 90s, true},
      {"up for two hours starts a new series", {end(0s), end(1min), end(3h, Cause::killed, 0, 2h)}, false, {}, true},
      {"after it the series goes on",
       {end(0s), end(3h, Cause::killed, 0, 2h), end(3h + 1min)},
       false,
       3h + 1min + 30s,
       true},
  };
  for (const Row& row : rows) {
    CAPTURE(row.what);
    const Verdict v = judge(row.ends, Time{}, 3);
    CHECK(v.blocked == row.blocked);
    CHECK(v.automatic == row.automatic);
    CHECK(v.not_before.has_value() == row.not_before.has_value());
    if (row.not_before && v.not_before) CHECK(*v.not_before == kStart + *row.not_before);
  }
}

TEST_CASE("what was before the operator acted is forgiven") {
  const std::vector<PastEnd> ends{end(0s, Cause::exited, 64)};
  CHECK(judge(ends, kStart, 3).blocked);
  CHECK_FALSE(judge(ends, kStart + 1ms, 3).blocked);
  const std::vector<PastEnd> loop{end(0s), end(1s), end(2s), end(3s), end(10s)};
  CHECK(judge(loop, kStart, 3).blocked);
  CHECK_FALSE(judge(loop, kStart + 5s, 3).blocked);
}

TEST_CASE("a crash loop stays one however late it is looked at") {
  // The verdict depends on the history alone; time that passes does not unblock it.
  const std::vector<PastEnd> loop{end(0s), end(1s), end(2s), end(3s)};
  CHECK(judge(loop, Time{}, 3).blocked);
  CHECK_FALSE(judge(loop, Time{}, 4).blocked);
  CHECK(judge(std::vector<PastEnd>{end(0s)}, Time{}, 0).blocked);
}

TEST_CASE("the earliest reason") {
  SUBCASE("the kill, not its echo, although the echo was first seen") {
    const std::vector<ObservedProcess> ends{ended(0, 68, 0, 10ms), ended(1, {}, 9, 20ms)};
    const auto reason = earliest_reason(ends);
    REQUIRE(reason);
    CHECK(reason->cause == Cause::killed);
    CHECK(reason->text.find("rank1") != std::string::npos);
  }
  SUBCASE("the earlier of two real ones") {
    const std::vector<ObservedProcess> ends{ended(0, 67, 0, 30ms), ended(1, 66, 0, 20ms)};
    CHECK(earliest_reason(ends)->exit_code == 66);
  }
  SUBCASE("those asked to stop say nothing") {
    const std::vector<ObservedProcess> ends{ended(0, 0, 0, 10ms, true), ended(1, 70, 0, 20ms)};
    CHECK(earliest_reason(ends)->exit_code == 70);
    CHECK_FALSE(earliest_reason(std::vector<ObservedProcess>{ended(0, 0, 0, 10ms, true)}));
  }
  SUBCASE("only echoes") {
    CHECK(earliest_reason(std::vector<ObservedProcess>{ended(0, 68, 0, 1ms)})->exit_code == 68);
  }
  SUBCASE("an unknown end") {
    CHECK(earliest_reason(std::vector<ObservedProcess>{ended(0, {}, 0, 1ms)})->cause == Cause::lost);
  }
}
