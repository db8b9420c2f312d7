// What becomes of generated text: cache.reuse_output.
#include <doctest/doctest.h>

#include "world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

SchedulerLimits reusing(ReuseOutput reuse) {
  SchedulerLimits l = caching(2, 2048, 8);
  l.reuse_output = reuse;
  return l;
}

wire::Submit question(uint64_t id, size_t prompt = 100, int32_t answer = 200) {
  wire::Submit r = make_request(id, prompt, answer);
  r.boundaries = {static_cast<int32_t>(prompt)};
  return r;
}

/// Tokens that a further turn finds.
uint32_t found(World& w, const wire::Submit& first, uint64_t id) {
  const wire::Submit second = next_turn(first, id, w.seen[first.id].output, 20);
  w.submit(second);
  w.run_dry();
  CHECK(w.seen[id].output == oracle(second).output);
  return w.seen[id].cached;
}

}  // namespace

TEST_CASE("never: an answer is read again by the next turn") {
  World w(reusing(ReuseOutput::never));
  const wire::Submit first = question(1);
  w.submit(first);
  w.run_dry();
  CHECK(w.executor.prompt_rows_run == 100);
  CHECK(found(w, first, 2) == 64);
}

TEST_CASE("always: the next turn starts at the last multiple of 64 of the answer") {
  World w(reusing(ReuseOutput::always));
  const wire::Submit first = question(1);
  w.submit(first);
  w.run_dry();
  CHECK(w.executor.prompt_rows_run == 100);
  CHECK(found(w, first, 2) == 256);  // of 300
  CHECK(w.executor.prompt_rows_run == 100 + 64);

  SUBCASE("not for others' salts") {
    wire::Submit other = next_turn(first, 3, w.seen[1].output, 20);
    other.salt = "other";
    w.submit(other);
    w.run_dry();
    CHECK(w.seen[3].cached == 0);
  }
  SUBCASE("not of requests that leave nothing behind") {
    wire::Submit silent = question(5);
    silent.cache_write = false;
    w.submit(silent);
    w.run_dry();
    CHECK(found(w, silent, 6) == 0);
  }
}

TEST_CASE("idle: an answer is read again as a prompt would be, and is then found") {
  World w(reusing(ReuseOutput::idle));
  const wire::Submit first = question(1);
  w.submit(first);
  while (w.seen[1].finish.empty()) w.turn();
  CHECK(w.executor.prompt_rows_run == 100);
  CHECK(w.scheduler.idle());
  CHECK(w.turn());
  CHECK(w.scheduler.idle());
  CHECK(w.scheduler.stats().running == 0);
  w.run_dry();
  CHECK(w.executor.prompt_rows_run == 100 + 256 - 64);  // from the end of the prompt on
  CHECK(w.scheduler.stats().prompt_tokens == 100);
  CHECK(found(w, first, 2) == 256);

  SUBCASE("once") {
    const size_t before = w.executor.prompt_rows_run;
    wire::Submit same = question(1);
    same.id = 7;
    w.submit(same);
    w.run_dry();
    CHECK(w.seen[7].output == w.seen[1].output);
    CHECK(w.executor.prompt_rows_run - before == 100 - 64);
  }
}

TEST_CASE("idle: whoever comes goes first, and what is left is read later") {
  SchedulerLimits limits = reusing(ReuseOutput::idle);
  limits.prefill_chunk = 64;
  World w(limits);
  const wire::Submit first = question(1);
  w.submit(first);
  while (w.seen[1].finish.empty()) w.turn();
  const wire::Submit urgent = question(2, 70, 20);
  CHECK(w.turn([&] { w.submit(urgent); }));  // while the first piece is read
  CHECK(w.scheduler.stats().running == 1);
  int turns = 0;
  for (; w.seen[2].finish.empty(); ++turns) CHECK(w.turn());
  CHECK(turns == 2 + 19);  // as if nothing else were there
  w.run_dry();
  CHECK(found(w, first, 3) == 256);

  SUBCASE("draining gives it up") {
    w.submit(question(8));
    while (w.seen[8].finish.empty()) w.turn();
    CHECK(w.turn());
    w.scheduler.drain();
    CHECK_FALSE(w.turn());
    w.run_dry();
  }
}

TEST_CASE("a stop string: what comes behind it is no answer and is not reused") {
  for (const ReuseOutput reuse : {ReuseOutput::idle, ReuseOutput::always}) {
    for (const uint32_t kept : {165u, 150u, 100u, 0u}) {
      CAPTURE(kept);
      World w(reusing(reuse));
      wire::Submit first = question(1);
      w.submit(first);
      while (w.seen[1].output.size() < 170) w.turn();
      w.scheduler.cancel(1, kept);
      w.collect();
      w.run_dry();
      // The state that was kept last is at 256; behind 100 and 150 tokens it is not the answer's.
      const uint32_t shared = kept == 165 ? 256 : 64, read = kept == 0 ? 64 : (100 + kept) / 64 * 64;
      const uint32_t expected = reuse == ReuseOutput::always ? shared : read;
      CHECK(found(w, first, 2) == expected);
    }
  }
  World w(reusing(ReuseOutput::idle));
  wire::Submit first = question(1);
  w.submit(first);
  while (w.seen[1].output.size() < 170) w.turn();
  w.scheduler.cancel(1);  // the client is gone: nobody knows whether it was an answer
  w.collect();
  w.run_dry();
  CHECK(found(w, first, 2) == 64);
}
