// The policy of the scheduler, rule by rule (engine/runtime/scheduler.cpp).
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

/// Another text for every id, of one length.
wire::Submit keyed(uint64_t id, const std::string& key, size_t prompt, int32_t max_tokens) {
  wire::Submit r = make_request(id, prompt, max_tokens);
  r.key = key;
  return r;
}

/// In which order the requests 1 … n ended.
std::vector<uint64_t> order_of_ends(World& w, uint64_t n) {
  std::vector<uint64_t> order;
  std::set<uint64_t> ended;
  while (w.turn())
    for (uint64_t id = 1; id <= n; ++id)
      if (!w.seen[id].finish.empty() && ended.insert(id).second) order.push_back(id);
  return order;
}

}  // namespace

TEST_CASE("lower priority numbers go first, and displace running ones of higher numbers, which lose nothing") {
  for (const int snaps : {0, 4}) {
    CAPTURE(snaps);
    World w(caching(1, 1024, snaps));
    wire::Submit bulk = make_request(1, 100, 40), urgent = make_request(2, 100, 10), normal = make_request(3, 100, 10);
    bulk.priority = 5;
    urgent.priority = -5;
    w.submit(bulk);
    for (int i = 0; i < 12; ++i) w.turn();
    CHECK(w.seen[1].output.size() > 5);
    w.submit(normal);
    w.submit(urgent);
    const size_t rows = w.executor.prompt_rows_run;
    CHECK(order_of_ends(w, 3) == std::vector<uint64_t>{2, 3, 1});
    CHECK(w.scheduler.stats().preemptions == 2);  // of 1 by 3, of 3 by 2
    for (const auto* r : {&bulk, &urgent, &normal}) CHECK(w.seen[r->id].output == oracle(*r).output);
    CHECK(w.executor.saves == (snaps > 0 ? 1 : 0));  // 3 had nothing to save yet
    // With its state saved, a prompt that was put back is not read again.
    CHECK(w.executor.prompt_rows_run - rows == (snaps > 0 ? 200 : 300));
    CHECK(w.seen[1].cached == 0);  // its own work is no hit
    w.scheduler.reset_cache();
    w.scheduler.check();
  }
}

TEST_CASE("equal priorities never displace each other; waiting gains a class a minute") {
  SchedulerLimits l = limits_of(1, 1024);
  l.aging = std::chrono::seconds(60);
  World w(l);
  w.submit(make_request(1, 64, 30));
  w.turn();
  wire::Submit patient = make_request(2, 64, 3);
  patient.priority = 1;
  w.submit(patient);
  for (int i = 0; i < 14; ++i) {  // two minutes and more
    w.now += std::chrono::seconds(10);
    w.turn();
  }
  w.submit(make_request(3, 64, 3));  // of a better class, but that has not waited
  CHECK(order_of_ends(w, 3) == std::vector<uint64_t>{1, 2, 3});
  CHECK(w.scheduler.stats().preemptions == 0);
}

TEST_CASE("keys have their turns alike, however many requests one of them sends") {
  World w(limits_of(1, 1024));
  for (uint64_t id = 1; id <= 6; ++id) w.submit(keyed(id, "many", 64, 10));
  w.submit(keyed(7, "few", 64, 10));
  w.submit(keyed(8, "few", 64, 10));
  CHECK(order_of_ends(w, 8) == std::vector<uint64_t>{1, 7, 2, 8, 3, 4, 5, 6});
}

TEST_CASE("small requests overtake one that does not fit, until it has waited long enough") {
  SchedulerLimits l = limits_of(2, 640);
  l.patience = std::chrono::seconds(120);
  World w(l);
  w.submit(make_request(1, 300, 100));  // 7 of 10 blocks
  w.turn();
  w.submit(make_request(2, 300, 100));  // has to wait for them
  w.submit(make_request(3, 64, 20));
  w.turn();
  CHECK(w.scheduler.stats().running == 2);
  CHECK(w.seen[2].output.empty());
  while (w.seen[3].finish.empty()) {
    w.now += std::chrono::seconds(8);
    w.turn();
  }
  CHECK(w.seen[1].finish.empty());
  w.submit(make_request(4, 64, 20));
  w.turn();
  CHECK(w.scheduler.stats().running == 1);  // nobody overtakes 2 any more
  CHECK(w.scheduler.stats().waiting == 2);
  w.run_dry();
  for (const uint64_t id : {1, 2, 3, 4}) CHECK(w.seen[id].finish == "length");
}

TEST_CASE("long prompts that wait are held back while memory is short, others go on") {
  World w(limits_of(1, 1024));
  w.submit(make_request(1, 100, 20));
  w.submit(make_request(2, 300, 5));
  w.submit(make_request(3, 100, 5));
  wire::Submit promised = make_request(4, 300, 5);
  promised.replayed = true;
  w.submit(promised);
  w.scheduler.hold_back(200);
  while (w.turn()) {
  }
  CHECK(w.seen[1].finish == "length");
  CHECK(w.seen[2].output.empty());
  CHECK(w.seen[2].finish.empty());
  CHECK(w.seen[3].finish == "length");
  CHECK(w.seen[4].finish == "length");
  CHECK(w.scheduler.stats().waiting == 1);
  w.now += Scheduler::Time(1000000);  // patience does not change it
  w.submit(make_request(5, 100, 5));
  while (w.turn()) {
  }
  CHECK(w.seen[5].finish == "length");
  w.scheduler.hold_back(std::nullopt);
  w.run_dry();
  CHECK(w.seen[2].output == oracle(make_request(2, 300, 5)).output);
}

TEST_CASE("the queue's limits are not for requests that another generation had taken") {
  SchedulerLimits limits = limits_of(1, 1024);
  limits.max_queue = 1;
  World w(limits);
  for (uint64_t id = 1; id <= 4; ++id) {
    wire::Submit r = make_request(id, 100, 5);
    r.replayed = id == 4;
    w.submit(r);
  }
  CHECK(w.seen[3].code == 429);
  w.run_dry();
  CHECK(w.seen[4].output == oracle(make_request(4, 100, 5)).output);
}

TEST_CASE("when blocks run short the last in order is put back, and all end with the text they should") {
  for (const int snaps : {0, 6}) {
    CAPTURE(snaps);
    SchedulerLimits l = caching(4, 640, snaps);
    l.reserve_output = 10;
    World w(l);
    for (uint64_t id = 1; id <= 4; ++id) w.submit(make_request(id, 100, 150));  // 2 blocks each, 4 in the end
    w.run_dry();
    CHECK(w.scheduler.stats().preemptions > 0);
    CHECK((w.executor.saves > 0) == (snaps > 0));
    for (uint64_t id = 1; id <= 4; ++id) CHECK(w.seen[id].output == oracle(make_request(id, 100, 150)).output);
  }
}

namespace {

struct BesidePrompt {
  double longest_gap = 0, took = 0;
  size_t generated = 0, steps = 0, parts = 0;
};

/// Three that generate, in steps of 10 ms, and a prompt of 2,000 tokens that comes while they do.
BesidePrompt beside_prompt(int32_t layers, double ms_a_row, double ms_a_piece) {
  SchedulerLimits l = limits_of(4, 8192);
  l.max_context = 4096;
  l.prefill_chunk = 256;
  l.max_rows = 4 + 256;
  l.layers = layers;
  World w(l);
  BesidePrompt seen;
  double clock = 0;
  w.executor.cost = [&](size_t window, size_t chunk) {
    const double piece = chunk > 0 ? ms_a_piece + ms_a_row * static_cast<double>(chunk) : 0;
    return (window > 0 ? 10 : 4) + piece;
  };
  for (uint64_t id = 1; id <= 3; ++id) w.submit(make_request(id, 64, 3000));
  for (int i = 0; i < 30; ++i) w.turn();
  w.submit(make_request(4, 2000, 5));
  size_t tokens = w.seen[1].output.size();
  const size_t before = tokens;
  double last = clock;
  while (w.seen[4].output.empty()) {
    const auto plan = w.scheduler.plan(w.now);
    REQUIRE(plan.has_value());
    w.executor.submit(*plan);
    const StepResult result = w.executor.poll().value();
    clock += result.device_ms;
    w.scheduler.complete(result);
    w.collect();
    if (w.seen[1].output.size() == tokens) continue;
    seen.longest_gap = std::max(seen.longest_gap, clock - last);
    last = clock;
    tokens = w.seen[1].output.size();
  }
  seen.took = clock;
  seen.generated = tokens - before;
  seen.parts = w.executor.parts;
  for (uint64_t id = 1; id <= 3; ++id) w.scheduler.cancel(id);
  w.run_dry();
  return seen;
}

}  // namespace

TEST_CASE("beside a prompt decoders keep their share of the time, and wait for one small piece at most") {
  // A row of a prompt costs 0.25 ms: 16 ms a chunk.
  const BesidePrompt seen = beside_prompt(1, 0.25, 0);
  CHECK(seen.longest_gap <= 3 * 10);
  // 2000 rows of 0.25 ms are 500 ms: 40% of the whole, so decoders have 750 ms.
  CHECK(seen.took > 1100);
  CHECK(seen.took < 1400);
  CHECK(seen.generated > 60);
  CHECK(seen.parts == 0);
}

TEST_CASE("where the least piece is longer than several steps, it passes a few layers in each") {
  // 80 ms a piece and 0.5 ms a row: 112 ms for the least, 208 for the largest, which reads four times as much.
  const BesidePrompt seen = beside_prompt(16, 0.5, 80);
  CHECK(seen.parts > 50);
  CHECK(seen.longest_gap <= 3 * 10);
  // In pieces of 256 rows 2000 take 1,640 ms; in the least they would take 3,560. 40% of the time.
  CHECK(seen.took < 1640 / 0.4 * 1.25);
  // Decoders have 60%.
  CHECK(static_cast<double>(seen.generated) * 10 / seen.took > 0.57);
  // The same model in whole pieces makes them wait for one.
  CHECK(beside_prompt(1, 0.5, 80).longest_gap > 110);
}

TEST_CASE("several prompts are read alike, whatever their lengths") {
  SchedulerLimits l = limits_of(3, 8192);
  l.max_context = 4096;
  World w(l);
  w.submit(make_request(1, 2000, 5));
  w.submit(make_request(2, 2000, 5));
  w.submit(make_request(3, 300, 5));
  CHECK(order_of_ends(w, 3) == std::vector<uint64_t>{3, 1, 2});
}

TEST_CASE("1,000 requests in the queue all end; the next are told when to come again") {
  SchedulerLimits l = caching(8, 4096, 4);
  l.max_queue = 1000;
  World w(l);
  w.executor.cost = [](size_t, size_t) { return 500.0; };
  for (uint64_t id = 1; id <= 1008; ++id)
    w.submit(keyed(id, cat("key", id % 7), 20 + id % 100, 1 + static_cast<int32_t>(id % 5)));
  CHECK(w.scheduler.stats().waiting == 1000);
  w.submit(make_request(2000, 10, 5));
  CHECK(w.seen[2000].code == 429);
  CHECK(w.seen[2000].retry_after == 1);  // nothing has ended yet
  for (int i = 0; i < 20; ++i) w.turn();
  for (uint64_t id = 3000; w.scheduler.stats().waiting < 1000; ++id) w.submit(make_request(id, 10, 5));
  w.submit(make_request(2001, 10, 5));
  CHECK(w.seen[2001].code == 429);
  CHECK(w.seen[2001].retry_after > 60);
  w.run_dry();
  for (uint64_t id = 1; id <= 1008; ++id) REQUIRE(w.seen[id].finish == "length");
}

TEST_CASE("an abort storm: 1,000 requests aborted at any time leave the pools as they were") {
  std::mt19937 random(4);
  World w(caching(6, 2048, 5));
  std::set<uint64_t> alive;
  for (uint64_t id = 1; id <= 1000; ++id) {
    wire::Submit r = make_request(id % 20, 1 + random() % 350, 1 + static_cast<int32_t>(random() % 50));
    r.id = id;
    r.priority = static_cast<int32_t>(random() % 3);
    w.submit(r);
    alive.insert(id);
    const auto abort = [&] {
      if (alive.empty() || random() % 2 == 0) return;
      auto victim = alive.begin();
      std::advance(victim, static_cast<ptrdiff_t>(random() % alive.size()));
      w.scheduler.cancel(*victim);
      w.collect();
      alive.erase(victim);
    };
    abort();
    for (int i = static_cast<int>(random() % 4); i > 0; --i) w.turn(abort);
  }
  for (const uint64_t id : alive) w.scheduler.cancel(id);
  w.collect();
  CHECK(w.scheduler.idle());
  w.scheduler.check();
  CHECK(w.scheduler.stats().blocks_used == 0);
  CHECK(w.scheduler.stats().slots_used == 0);
  w.scheduler.reset_cache();
  CHECK(w.scheduler.cache().blocks().used() == 0);
  CHECK(w.scheduler.cache().snaps().used() == 0);
}

TEST_CASE("draining refuses what never ran and finishes what was put back") {
  World w(limits_of(1, 1024));
  wire::Submit bulk = make_request(1, 64, 20), urgent = make_request(2, 64, 5);
  bulk.priority = 1;
  w.submit(bulk);
  for (int i = 0; i < 5; ++i) w.turn();
  w.submit(urgent);
  w.submit(make_request(3, 64, 5));
  w.scheduler.drain();
  w.collect();
  CHECK(w.seen[3].code == 503);
  CHECK(w.seen[3].retry_after > 0);
  w.run_dry();
  CHECK(w.seen[1].output == oracle(bulk).output);
  CHECK(w.seen[2].output == oracle(urgent).output);
}

TEST_CASE("the cost of steps is learned, and a share is kept over time") {
  LineFit fit;
  CHECK_FALSE(fit.known());
  for (const double x : {64.0, 128.0, 256.0, 64.0}) fit.observe(x, 5 + 0.5 * x);
  CHECK(fit.at(200) == doctest::Approx(105));
  CHECK(fit.reach(105) == doctest::Approx(200));
  CHECK(fit.reach(1) == 0);
  for (int i = 0; i < 200; ++i) fit.observe(i % 2 == 0 ? 64 : 128, i % 2 == 0 ? 64 : 128);  // it has become another
  CHECK(fit.at(256) == doctest::Approx(256).epsilon(0.01));
  LineFit falling;  // nonsense of a few outliers is no line that falls
  falling.observe(64, 100);
  falling.observe(128, 10);
  CHECK(falling.at(1000) >= falling.at(10));

  CHECK_THROWS_AS(PrefillShare(0, 100, 1), Error);
  CHECK_THROWS_AS(PrefillShare(1, 100, 1), Error);
  CHECK_THROWS_AS(PrefillShare(0.5, 0, 1), Error);
  CHECK_THROWS_AS(PrefillShare(0.5, 100, 0), Error);
  // Where prompts wait from the start, a step without them must show first what they are to be measured by.
  StepCost fresh;
  fresh.observe(0, 256, 80);
  const PrefillShare first(0.25, 1000, 1);
  CHECK(first.rows(0, fresh, 512) == 512);
  CHECK(first.rows(2, fresh, 512) == 0);
  fresh.observe(2, 0, 40);
  CHECK(first.rows(2, fresh, 512) == 256);
  StepCost cost;
  for (int i = 0; i < 50; ++i) {
    cost.observe(2, 0, 10);
    cost.observe(2, 128, 10 + 40);
    cost.observe(2, 256, 10 + 80);
  }
  PrefillShare share(0.25, 1000, 1);
  CHECK(share.rows(0, cost, 512) == 512);
  double window = 0, chunk = 0;
  for (int i = 0; i < 2000; ++i) {
    const int32_t rows = share.rows(2, cost, 512);
    CHECK(rows % 64 == 0);
    CHECK(rows <= 64);  // 20 ms are what two steps take
    const double planned = cost.chunk_ms(rows), ran = 0.3125 * rows;
    share.planned(planned);
    share.ran(planned, 10, ran);
    window += 10;
    chunk += ran;
  }
  CHECK(chunk / (window + chunk) == doctest::Approx(0.25).epsilon(0.02));
}
