// Requests whose beginning comes back from the spill tier: the scheduler with a hash for a model, and the copies of a
// real rank.
#include <future>
#include <random>

#include <doctest/doctest.h>

#include "common/digest.h"
#include "common/strings.h"
#include "engine/runtime/spill_tier.h"
#include "tests/temp_dir.h"
#include "world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

SchedulerLimits spilling(const HashExecutor::Spilled& spilled, int32_t blocks = 24, int32_t snaps = 6) {
  SchedulerLimits l = caching(3, 64 * blocks, snaps);
  l.spill = &spilled;
  l.identity = {.model_revision = "hash", .weights_digest = "1", .kv_format = "rows", .kpool = 4, .topk = 8};
  l.restore_blocks = 100;
  return l;
}

/// A World whose restores are answered when the test says so.
struct SpillWorld : World {
  explicit SpillWorld(HashExecutor::Spilled& spilled, const SchedulerLimits& limits) : World(limits) {
    executor.spilled = &spilled;
  }
  void order() {
    for (RestoreOrder& o : scheduler.take_restores()) {
      CHECK(!o.items.empty());
      pending.emplace_back(o.id, std::move(o.items));
    }
  }
  void answer(bool ok) {
    order();
    const auto [id, items] = pending.front();
    pending.erase(pending.begin());
    for (const SpillItem& item : items) {
      const auto at = executor.spilled->things.find(item.meta.name);
      ok = ok && at != executor.spilled->things.end();
      // The class is what the tier knows; the rest says whose bytes they are.
      if (ok) CHECK((at->second.meta.position == item.meta.position && at->second.meta.tokens == item.meta.tokens));
    }
    executor.fetched[id] = items;
    scheduler.restored(id, ok);
    scheduler.check();
  }
  /// Until nobody waits for anything.
  void run(bool ok = true) {
    for (int limit = 100000; limit > 0; --limit) {
      const bool worked = turn();
      order();
      if (!pending.empty()) {
        answer(ok);
        continue;
      }
      if (!worked && scheduler.idle()) break;
    }
    REQUIRE(scheduler.idle());
    CHECK(scheduler.stats().blocks_used == 0);
    CHECK(scheduler.stats().slots_used == 0);
  }
  void finish(const wire::Submit& r, bool ok = true) {
    submit(r);
    run(ok);
    CHECK(seen.at(r.id).output == oracle(r).output);
  }
  std::vector<std::pair<uint64_t, std::vector<SpillItem>>> pending;
};

wire::Submit turn_of(uint64_t id, uint64_t text, size_t prompt) {
  wire::Submit r = make_request(text, prompt, 5);
  r.id = id;
  r.boundaries = {static_cast<int32_t>(prompt) - 4};
  return r;
}

/// Other text, until nothing of before is left in the pools.
void displace(SpillWorld& w, uint64_t first_id, int count = 8) {
  for (int i = 0; i < count; ++i)
    w.finish(turn_of(first_id + static_cast<uint64_t>(i), first_id + static_cast<uint64_t>(i), 400));
}

}  // namespace

TEST_CASE("spilled text: evicted, it comes back and is not computed again") {
  HashExecutor::Spilled spilled;
  SpillWorld w(spilled, spilling(spilled));
  w.finish(turn_of(1, 1, 500));
  CHECK(w.seen[1].cached == 0);
  displace(w, 10);
  CHECK(spilled.things.size() > 10);
  const size_t before = w.executor.prompt_rows_run;
  w.finish(turn_of(2, 1, 500));
  CHECK(w.seen[2].cached == 448);  // the turn's snapshot, at a multiple of 64
  CHECK(w.executor.prompt_rows_run - before == 500 - 448);
  CHECK(w.scheduler.stats().restores >= 1);
  CHECK(w.scheduler.stats().restores_failed == 0);
}

TEST_CASE("spilled text: a new process finds it; another salt or another model does not") {
  HashExecutor::Spilled spilled;
  {
    SpillWorld w(spilled, spilling(spilled));
    w.finish(turn_of(1, 1, 500));
    displace(w, 10);
  }
  {
    SpillWorld w(spilled, spilling(spilled));
    w.finish(turn_of(2, 1, 500));
    CHECK(w.seen[2].cached == 448);
  }
  {
    SpillWorld w(spilled, spilling(spilled));
    wire::Submit r = turn_of(3, 1, 500);
    r.salt = "somebody else";
    w.finish(r);
    CHECK(w.seen[3].cached == 0);
  }
  SchedulerLimits other = spilling(spilled);
  other.identity.weights_digest = "2";
  SpillWorld w(spilled, other);
  w.finish(turn_of(4, 1, 500));
  CHECK(w.seen[4].cached == 0);
}

TEST_CASE("spilled text: when a rank has lost it, it is computed") {
  HashExecutor::Spilled spilled;
  SpillWorld w(spilled, spilling(spilled));
  w.finish(turn_of(1, 1, 500));
  displace(w, 10);
  w.finish(turn_of(2, 1, 500), false);
  CHECK(w.seen[2].cached < 448);
  CHECK(w.scheduler.stats().restores == 0);
  CHECK(w.scheduler.stats().restores_failed == 1);
}

TEST_CASE("spilled text: others go on while it is on its way, and whoever waits for it may leave") {
  HashExecutor::Spilled spilled;
  SpillWorld w(spilled, spilling(spilled));
  w.finish(turn_of(1, 1, 500));
  displace(w, 10);
  w.submit(turn_of(2, 1, 500));
  w.order();
  REQUIRE(w.pending.size() == 1);
  w.submit(turn_of(3, 3, 100));
  while (w.seen[3].finish.empty()) REQUIRE(w.turn());
  CHECK(w.seen[2].output.empty());
  SUBCASE("it comes") {
    w.answer(true);
    w.run();
    CHECK(w.seen[2].output == oracle(turn_of(2, 1, 500)).output);
    CHECK(w.seen[2].cached == 448);
  }
  SUBCASE("its request is cancelled") {
    w.scheduler.cancel(2);
    w.scheduler.check();
    CHECK(w.scheduler.idle());
    w.answer(true);  // too late
    w.run();
    CHECK(w.executor.fetched.empty());
    CHECK(w.scheduler.stats().restores == 0);
  }
  SUBCASE("the cache is reset meanwhile") {
    w.scheduler.reset_cache();
    w.answer(true);
    w.run();
    CHECK(w.seen[2].output == oracle(turn_of(2, 1, 500)).output);
    CHECK(w.seen[2].cached == 0);
  }
  SUBCASE("the API process goes away") {
    w.scheduler.cancel_all();
    w.scheduler.check();
    w.answer(true);
    w.run();
    CHECK(w.executor.fetched.empty());
  }
}

TEST_CASE("spilled text: whatever the order of things, every request gets what it gets alone") {
  size_t restores = 0, failed = 0;
  for (uint32_t seed = 1; seed <= 400; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto pick = [&](int n) { return std::uniform_int_distribution(0, n - 1)(random); };
    HashExecutor::Spilled spilled;
    uint64_t id = 0;
    for (int process = 0; process < 2; ++process) {
      SpillWorld w(spilled, spilling(spilled, 16 + pick(20), 2 + pick(6)));
      std::map<uint64_t, wire::Submit> asked;
      for (int i = 0; i < 60; ++i) {
        if (pick(3) == 0) {
          wire::Submit r = turn_of(++id, static_cast<uint64_t>(pick(5)), static_cast<size_t>(70 + 60 * pick(7)));
          r.priority = pick(3) - 1;
          asked[id] = r;
          w.submit(r);
        }
        if (pick(20) == 0 && !asked.empty()) {
          const uint64_t gone = std::next(asked.begin(), pick(static_cast<int>(asked.size())))->first;
          w.scheduler.cancel(gone);
          w.collect();
          asked.erase(gone);
        }
        if (pick(100) == 0) w.scheduler.reset_cache();
        if (pick(50) == 0 && !spilled.things.empty()) spilled.things.erase(spilled.things.begin());
        w.order();
        if (!w.pending.empty() && pick(2) == 0) w.answer(pick(5) != 0);
        w.turn();
      }
      w.run();
      for (const auto& [number, r] : asked) REQUIRE(w.seen.at(number).output == oracle(r).output);
      restores += w.scheduler.stats().restores;
      failed += w.scheduler.stats().restores_failed;
    }
  }
  MESSAGE(restores, " restores, ", failed, " failed");
  CHECK(restores > 100);
  CHECK(failed > 10);
}

namespace {

/// Pools of a rank with bytes that say what they are.
struct Pools {
  std::vector<uint8_t> blocks = std::vector<uint8_t>(5 * 96);
  std::vector<float> state = std::vector<float>(3 * 8), conv = std::vector<float>(3 * 6),
                     ring = std::vector<float>(3 * 4);
  Caches caches;
  Pools() {
    caches.blocks = Tensor::of(blocks.data(), Dtype::u8, {5, 96});
    caches.snap_state = Tensor::of(state.data(), Dtype::f32, {3, 8});
    caches.snap_conv = Tensor::of(conv.data(), Dtype::f32, {3, 2, 3});
    caches.snap_ring = Tensor::of(ring.data(), Dtype::f32, {3, 4});
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(i * 7);
    float next = 0;
    for (auto* v : {&state, &conv, &ring})
      for (float& x : *v) x = ++next;
  }
};

SpillItem item_of(spill::Kind kind, int32_t id, uint8_t number) {
  SpillItem item;
  item.meta.name.kind = kind;
  item.meta.name.hash[0] = number;
  item.meta.position = 64;
  item.id = id;
  return item;
}

bool fetch(SpillTier& tier, uint64_t restore, std::vector<SpillItem> items) {
  std::promise<bool> done;
  tier.fetch(restore, std::move(items), [&](bool ok) { done.set_value(ok); });
  return done.get_future().get();
}

}  // namespace

TEST_CASE("spill tier of a rank: bytes leave the pools, and come back to other places, also after a restart") {
  TempDir dir;
  const auto ops = make_cpu_ops(1);
  spill::StoreOptions options;
  options.disk = {.dir = dir.path(), .name_space = sha256_hex("x"), .bytes = 1 << 20, .largest_record = 96};
  const Pools before;
  {
    Pools pools;
    REQUIRE(SpillTier::block_bytes(pools.caches) == 96);
    REQUIRE(SpillTier::snapshot_bytes(pools.caches) == 4 * (8 + 6 + 4));
    SpillTier tier(options, pools.caches, *ops);
    StepPlan plan;
    plan.spill = {item_of(spill::Kind::block, 2, 1), item_of(spill::Kind::snapshot, 1, 1)};
    tier.run(plan);
  }
  Pools pools;
  for (auto& b : pools.blocks) b = 0;
  for (auto* v : {&pools.state, &pools.conv, &pools.ring}) std::fill(v->begin(), v->end(), 0.0f);
  SpillTier tier(options, pools.caches, *ops);
  tier.store().settle();
  REQUIRE(fetch(tier, 7, {item_of(spill::Kind::block, 4, 1), item_of(spill::Kind::snapshot, 0, 1)}));
  CHECK_FALSE(fetch(tier, 8, {item_of(spill::Kind::block, 3, 9)}));
  StepPlan plan;
  plan.load = {{7, true}, {8, false}, {9, false}};
  tier.run(plan);
  CHECK(std::equal(pools.blocks.begin() + 4 * 96, pools.blocks.end(), before.blocks.begin() + 2 * 96));
  CHECK(std::count(pools.blocks.begin(), pools.blocks.begin() + 4 * 96, 0) == 4 * 96);
  CHECK(std::equal(pools.state.begin(), pools.state.begin() + 8, before.state.begin() + 8));
  CHECK(std::equal(pools.conv.begin(), pools.conv.begin() + 6, before.conv.begin() + 6));
  CHECK(std::equal(pools.ring.begin(), pools.ring.begin() + 4, before.ring.begin() + 4));
  CHECK(std::count(pools.state.begin() + 8, pools.state.end(), 0.0f) == 16);
}

TEST_CASE("spill tier of a rank: plans that contradict what is there") {
  Pools pools;
  const auto ops = make_cpu_ops(1);
  spill::StoreOptions options;
  options.memory_bytes = 1 << 20;
  SpillTier tier(options, pools.caches, *ops);
  StepPlan plan;
  plan.load = {{1, true}};
  CHECK_THROWS_AS(tier.run(plan), Error);
  CHECK_FALSE(fetch(tier, 2, {item_of(spill::Kind::block, 3, 9)}));
  plan.load = {{2, true}};
  CHECK_THROWS_AS(tier.run(plan), Error);
  plan.load.clear();
  for (const SpillItem& item : {item_of(spill::Kind::block, 0, 1), item_of(spill::Kind::block, 5, 1),
                                item_of(spill::Kind::snapshot, 3, 1), item_of(spill::Kind::snapshot, -1, 1)}) {
    plan.spill = {item};
    CHECK_THROWS_AS(tier.run(plan), Error);
  }
}
