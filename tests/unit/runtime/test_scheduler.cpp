#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/runtime/scheduler.h"
#include "world.h"

using namespace glm53;
using namespace glm53::test;

TEST_CASE("every request of a random crowd gets what it gets alone, in pools of any size") {
  for (const int seqs : {1, 2, 3, 8}) {
    for (const int cache : {640, 1024, 4096}) {
      CAPTURE(seqs);
      CAPTURE(cache);
      std::mt19937 random(static_cast<unsigned>(seqs * 1000 + cache));
      World w(limits_of(seqs, cache));
      std::map<uint64_t, wire::Submit> requests;
      std::set<uint64_t> cancelled;
      uint64_t id = 0;
      for (int round = 0; round < 400; ++round) {
        if (random() % 4 == 0) {
          wire::Submit r = make_request(++id, 1 + random() % 400, 1 + static_cast<int32_t>(random() % 60));
          r.sampling.ignore_eos = random() % 2 == 0;
          if (random() % 3 == 0)
            r.sampling.stop_ids = {static_cast<int32_t>(random() % kVocab), static_cast<int32_t>(random() % kVocab)};
          if (random() % 4 == 0) {  // replayed after a restart
            const Tokens all = oracle(r).output;
            r.emitted.assign(all.begin(), all.begin() + static_cast<ptrdiff_t>(random() % (all.size() + 1)));
          }
          requests[id] = r;
          w.submit(r);
        }
        const auto abort = [&] {
          if (id == 0 || random() % 12 != 0) return;
          const uint64_t victim = 1 + random() % id;
          if (!w.seen[victim].finish.empty()) return;
          w.scheduler.cancel(victim);
          w.collect();
          cancelled.insert(victim);
        };
        abort();
        w.turn(abort);
      }
      w.run_dry();
      for (const auto& [n, r] : requests) {
        CAPTURE(n);
        const Expected e = oracle(r);
        const World::Seen& s = w.seen.at(n);
        if (cancelled.contains(n)) {
          CHECK(s.finish == "abort");
          REQUIRE(s.output.size() <= e.output.size());
          CHECK(std::equal(s.output.begin(), s.output.end(), e.output.begin()));
        } else {
          CHECK(s.finish == e.finish);
          CHECK(s.output == e.output);
          if (e.finish == "stop") CHECK(s.stop_token == e.output.back());
        }
      }
      CHECK(requests.size() > 50);
      if (seqs > 1) CHECK(w.executor.most_seqs > 1);
      CHECK(w.executor.widest_window > 1);  // replay used the window
    }
  }
}

TEST_CASE("a decoder gets a token in every step while prompts are read, and a prompt never waits for decoders to end") {
  World w(limits_of(4, 4096));
  w.submit(make_request(1, 10, 200));
  w.turn();
  w.submit(make_request(2, 500, 5));
  size_t steps = 0;
  while (w.seen[2].output.empty()) {
    const size_t before = w.seen[1].output.size();
    REQUIRE(w.turn());
    CHECK(w.seen[1].output.size() == before + 1);
    ++steps;
  }
  CHECK(steps == 5);  // one that shows what decoders cost alone, then 500 tokens in pieces of 128
  w.run_dry();
}

TEST_CASE("what can never run is refused, naming the limit") {
  SchedulerLimits l = limits_of(2, 320);
  World w(l);
  const auto refused = [&](wire::Submit r) {
    w.submit(r);
    CHECK(w.seen[r.id].finish == "error");
    return w.seen[r.id].code;
  };
  CHECK(refused(make_request(1, 600, 1)) == 400);
  CHECK(refused(make_request(2, 500, 200)) == 400);
  CHECK(refused(make_request(3, 0, 5)) == 400);
  CHECK(refused(make_request(4, 300, 100)) == 400);  // more blocks than there are
  wire::Submit r = make_request(5, 5, 5);
  r.prompt[2] = kVocab;
  CHECK(refused(r) == 400);
  r = make_request(6, 5, 5);
  r.sampling.temperature = -1;
  CHECK(refused(r) == 400);
  r = make_request(7, 5, 5);
  r.emitted.assign(6, 1);
  CHECK(refused(r) == 400);
  w.run_dry();
}

TEST_CASE("the queue is limited by requests and by tokens") {
  SchedulerLimits l = limits_of(1, 640);
  l.max_queue = 2;
  l.max_queue_tokens = 100;
  World w(l);
  w.submit(make_request(1, 10, 10));  // runs
  w.submit(make_request(2, 10, 10));
  w.submit(make_request(3, 95, 10));  // too many tokens beside 2
  CHECK(w.seen[3].code == 429);
  w.submit(make_request(4, 10, 10));
  w.submit(make_request(5, 10, 10));  // too many requests
  CHECK(w.seen[5].code == 429);
  CHECK(w.scheduler.stats().running == 1);
  CHECK(w.scheduler.stats().waiting == 2);
  w.run_dry();
  for (const uint64_t id : {1, 2, 4}) CHECK(w.seen[id].finish == "length");
  l.max_queue = 0;  // nothing may wait, but what can start at once does
  World none(l);
  none.submit(make_request(1, 10, 10));
  none.submit(make_request(2, 10, 10));
  none.run_dry();
  CHECK(none.seen[1].finish == "length");
  CHECK(none.seen[2].code == 429);
}

TEST_CASE("a closed gate admits canaries only; draining admits nobody and lets what runs finish") {
  World w(limits_of(1, 640));
  w.scheduler.set_gate(false);
  w.submit(make_request(1, 10, 3));
  CHECK(w.seen[1].code == 503);
  wire::Submit canary = make_request(2, 10, 3);
  canary.key = "canary";
  w.submit(canary);
  w.scheduler.set_gate(true);
  w.submit(make_request(3, 10, 3));  // waits: one slot
  w.turn();
  w.scheduler.drain();
  w.collect();
  CHECK(w.seen[3].code == 503);
  w.submit(make_request(4, 10, 3));
  CHECK(w.seen[4].code == 503);
  w.run_dry();
  CHECK(w.seen[2].output == oracle(canary).output);
}

TEST_CASE("cancel frees everything at once, also while the step runs") {
  World w(limits_of(1, 640));
  w.submit(make_request(1, 300, 50));
  w.submit(make_request(2, 300, 5));
  w.turn([&] {
    w.scheduler.cancel(1);
    w.collect();
    CHECK(w.seen[1].finish == "abort");
    CHECK(w.scheduler.stats().running == 1);  // the other one has its slot
    CHECK(w.scheduler.stats().waiting == 0);
  });
  w.run_dry();
  CHECK(w.seen[2].output == oracle(make_request(2, 300, 5)).output);
  CHECK(w.seen[1].output.empty());
  w.scheduler.cancel(77);  // unknown
  w.submit(make_request(3, 10, 5));
  w.scheduler.cancel_all();
  w.run_dry();
  CHECK(w.seen[3].finish.empty());
}

TEST_CASE("an id that comes again replaces its older request") {
  World w(limits_of(2, 640));
  w.submit(make_request(1, 100, 50));
  w.turn();
  w.turn();
  w.collect();
  wire::Submit again = make_request(1, 20, 4);
  w.submit(again);
  w.run_dry();
  CHECK(w.seen[1].output == oracle(again).output);
  CHECK(w.seen[1].finish == "length");
}

TEST_CASE("deadlines end waiting and running requests") {
  World w(limits_of(1, 640));
  wire::Submit a = make_request(1, 10, 500), b = make_request(2, 10, 5);
  a.deadline_ms = 1000;
  b.deadline_ms = 500;
  w.submit(a);
  w.submit(b);
  w.turn();
  w.now = Scheduler::Time(600);
  w.turn();
  CHECK(w.seen[2].code == 504);
  CHECK(w.seen[1].finish.empty());
  w.now = Scheduler::Time(1000);
  CHECK_FALSE(w.turn());
  CHECK(w.seen[1].code == 504);
  w.run_dry();
}

TEST_CASE("a token of nothing allowed ends the request as an error") {
  SamplingTable table(kSpace);
  Scheduler scheduler(limits_of(1, 640), table, 1);
  scheduler.set_gate(true);
  scheduler.submit(make_request(1, 5, 5));
  const auto plan = scheduler.plan(Scheduler::Time(0));
  REQUIRE(plan.has_value());
  scheduler.complete({.step = plan->step,
                      .seqs = {{.request = 1, .tokens = {{.token = -1, .logprob = 0, .top = {}}}, .accepted = 0}},
                      .device_ms = 0,
                      .stages = {}});
  const auto deltas = scheduler.take_deltas();
  REQUIRE(deltas.size() == 1);
  CHECK(deltas[0].error_code == 400);
  CHECK(deltas[0].tokens.empty());
  CHECK(scheduler.idle());
}

TEST_CASE("the next turn of a conversation starts at the snapshot of the one before, and says so") {
  World w(caching(2, 2048, 8));
  wire::Submit first = make_request(1, 300, 10);
  first.boundaries = {100, 290};
  w.submit(first);
  w.run_dry();
  CHECK(w.seen[1].cached == 0);
  CHECK(w.scheduler.stats().snaps_used == 3);  // 64, 128, 256
  const wire::Submit second = next_turn(first, 2, w.seen[1].output, 20);
  const size_t before = w.executor.prompt_rows_run;
  w.submit(second);
  w.run_dry();
  CHECK(w.seen[2].cached == 256);
  CHECK(w.seen[2].output == oracle(second).output);
  CHECK(w.executor.prompt_rows_run - before == second.prompt.size() - 256);
  CHECK(w.scheduler.stats().prefix_hits == 256);
  CHECK(w.scheduler.stats().prefix_queries == first.prompt.size() + second.prompt.size());

  wire::Submit other = second;  // the same text of somebody else
  other.id = 3;
  other.salt = "somebody else";
  w.submit(other);
  w.run_dry();
  CHECK(w.seen[3].cached == 0);

  wire::Submit unwritten = make_request(4, 300, 5);
  unwritten.cache_write = false;
  w.submit(unwritten);
  w.run_dry();
  unwritten.id = 5;
  w.submit(unwritten);
  w.run_dry();
  CHECK(w.seen[5].cached == 0);

  w.scheduler.reset_cache();
  w.scheduler.check();
  CHECK(w.scheduler.stats().blocks_cached == 0);
  CHECK(w.scheduler.stats().snaps_used == 0);
  wire::Submit again = second;
  again.id = 6;
  w.submit(again);
  w.run_dry();
  CHECK(w.seen[6].cached == 0);
  CHECK(w.seen[6].output == w.seen[2].output);
}

TEST_CASE("text is shared while its first reader still runs, and stays right when that one is cancelled") {
  World w(caching(3, 2048, 8));
  wire::Submit first = make_request(1, 400, 50);
  w.submit(first);
  for (int i = 0; i < 2; ++i) w.turn();  // 256 read
  wire::Submit second = first;
  second.id = 2;
  second.sampling.max_tokens = 20;
  w.submit(second);
  for (int turns = 0; w.executor.restores == 0; ++turns) {
    REQUIRE(turns < 10);
    w.turn([&] {
      if (w.executor.restores == 0) return;
      w.scheduler.cancel(1);  // while the restore and both readers run
      w.collect();
      w.scheduler.check();
    });
  }
  w.submit([&] {
    wire::Submit third = second;
    third.id = 3;
    return third;
  }());
  for (int turns = 0; w.executor.restores == 1; ++turns) {
    REQUIRE(turns < 10);
    w.turn([&] {
      if (w.executor.restores == 1) return;
      w.scheduler.reset_cache();
      w.scheduler.cancel(3);
      w.collect();
      w.scheduler.check();
    });
  }
  w.run_dry();
  CHECK(w.seen[2].cached == 256);
  CHECK(w.seen[2].output == oracle(second).output);
  w.scheduler.reset_cache();
  w.scheduler.check();
  CHECK(w.scheduler.cache().blocks().used() == 0);
  CHECK(w.scheduler.cache().snaps().used() == 0);
}

TEST_CASE("limits that contradict each other are refused") {
  SamplingTable table(kSpace);
  const auto bad = [&](auto change) {
    SchedulerLimits l = limits_of(2, 640);
    change(l);
    CHECK_THROWS_AS(Scheduler(l, table, 1), Error);
  };
  bad([](auto& l) { l.prefill_chunk = 100; });
  bad([](auto& l) { l.max_rows = 65; });
  bad([](auto& l) { l.blocks = 1; });
  bad([](auto& l) { l.max_seqs = 0; });
}
