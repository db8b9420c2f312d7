#include <doctest/doctest.h>

#include "tests/unit/prefix/world.h"

namespace glm53::prefix {
namespace {

using std::chrono::minutes;

int32_t cached(World& w, const Tokens& t) {
  // With no snapshot allowed a lookup does not touch anything.
  const Hit hit = w.index.lookup("", {t, {}, static_cast<int32_t>(t.size()), 0}, w.now, 0);
  w.give(w.index.release(hit.lease, {}));
  return hit.matched;
}

TEST_CASE("blocks: orphans first, then leaves, each least recently used first") {
  World w;
  w.run(text(1, 192), {{128, SnapClass::turn}});  // its last block is an orphan
  w.run(text(2, 128), {});                        // both are
  w.run(text(3, 64), {{64, SnapClass::turn}});
  w.run(text(4, 128), {{128, SnapClass::turn}});
  w.probe(text(3, 64) + Tokens{1});  // used again
  const auto left = [&] {
    return std::vector<int32_t>{cached(w, text(1, 192)), cached(w, text(2, 128)), cached(w, text(3, 64)),
                                cached(w, text(4, 128))};
  };
  const std::vector<std::vector<int32_t>> expected{{192, 128, 64, 128}, {128, 128, 64, 128}, {128, 64, 64, 128},
                                                   {128, 0, 64, 128},   {64, 0, 64, 128},    {0, 0, 64, 128},
                                                   {0, 0, 64, 64},      {0, 0, 64, 0},       {0, 0, 0, 0}};
  for (size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    CHECK(left() == expected[i]);
    w.check();
    const Freed freed = w.index.evict_blocks(1);
    CHECK(freed.blocks.size() == (i + 1 < expected.size() ? 1 : 0));
    w.give(freed);
  }
  CHECK(w.index.counters().blocks_evicted == 8);
  CHECK(w.index.contents().snaps == 0);
}

TEST_CASE("a parent that became an orphan goes before leaves with snapshots") {
  World w;
  w.run(text(1, 64), {{64, SnapClass::turn}});  // older
  w.run(text(2, 192), {{192, SnapClass::turn}});
  w.give(w.index.evict_snapshots(1, w.now));  // 64 tokens saved against 192
  CHECK(w.index.contents().snaps == 1);
  w.give(w.index.evict_blocks(1));
  CHECK(cached(w, text(1, 64)) == 0);
  CHECK(cached(w, text(2, 192)) == 192);
}

TEST_CASE("evicting a block drops the snapshots in it, and only those") {
  World w;
  w.run(text(1, 192),
        {{30, SnapClass::output}, {64, SnapClass::turn}, {150, SnapClass::output}, {192, SnapClass::turn}});
  const Freed freed = w.index.evict_blocks(1);
  CHECK(freed.blocks.size() == 1);
  CHECK(freed.snaps.size() == 2);
  w.give(freed);
  w.check();
  CHECK(w.probe(text(1, 192)).position == 64);
}

TEST_CASE("nothing with a reference below it is evicted") {
  World w;
  w.run(text(1, 256), {{256, SnapClass::turn}});
  w.run(text(1, 128) + text(2, 128), {});
  auto s = w.start(text(1, 256) + Tokens{1});
  REQUIRE(s.hit.position == 256);
  CHECK(w.index.contents().blocks == 6);
  CHECK(w.index.contents().evictable == 2);
  const Freed freed = w.index.evict_blocks(100);
  CHECK(freed.blocks.size() == 2);
  w.give(freed);
  CHECK(w.index.contents().evictable == 0);
  w.check(1);
  w.settle(s);
  w.release(s);
  CHECK(w.index.contents().evictable == 4);
  w.check();
}

TEST_CASE("snapshots: the distance to the next shallower one counts") {
  World w;
  w.run(text(1, 640), {{64, SnapClass::turn}, {576, SnapClass::turn}, {640, SnapClass::turn}});
  // 64 − 0, 576 − 64, 640 − 576: a tie between the first and the last, which the lower id (the first) loses.
  w.give(w.index.evict_snapshots(1, w.now));
  CHECK(w.probe(text(1, 500)).position == 0);
  w.give(w.index.evict_snapshots(1, w.now));
  CHECK(w.probe(text(1, 640) + Tokens{1}).position == 576);
  CHECK(w.index.lowest_value(w.now) > 2 * 576);  // the probe was a use
  w.check();
}

TEST_CASE("snapshots: the shallower one may be in the same block") {
  World w;
  w.run(text(1, 50), {{30, SnapClass::output}, {50, SnapClass::output}});
  w.run(text(2, 25), {{25, SnapClass::output}});
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(20));  // 50 − 30; the others 30 and 25
  w.give(w.index.evict_snapshots(1, w.now));
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(25));
  CHECK(w.probe(text(1, 50) + Tokens{1}).position == 30);
}

TEST_CASE("a turn that its conversation has passed is worth no more than an interval, and nothing to later ones") {
  World w;
  w.run(text(1, 256), {{64, SnapClass::head}, {256, SnapClass::turn}});
  auto next = w.start(text(1, 512));
  CHECK(next.hit.position == 256);
  CHECK(next.hit.base == 64);
  w.settle(next);
  w.index.pass(next.hit.lease);
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(0.5 * 2 * (256 - 64)));  // before: 2 · 2 · (256 − 64)
  w.index.pass(next.hit.lease, false);
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(8 * 64));
  w.index.pass(next.hit.lease);
  w.insert(next, 512, {{512, SnapClass::turn}});
  w.release(next);
  w.give(w.index.evict_snapshots(1, w.now));  // the one passed
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(8 * 64));
  CHECK(w.probe(text(1, 256) + Tokens{1}).position == 64);
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(2 * (512 - 64)));
  w.check();

  SUBCASE("only turns are passed") {
    w.run(text(2, 128), {{128, SnapClass::head}});
    auto one = w.start(text(2, 256));
    CHECK(one.hit.base == 128);
    w.settle(one);
    w.index.pass(one.hit.lease);
    w.index.pass(w.start(text(3, 64)).hit.lease);  // hit nothing
    CHECK(*w.index.lowest_value(w.now) == doctest::Approx(2 * (512 - 64)));
    w.give(w.index.evict_snapshots(2, w.now));
    CHECK(*w.index.lowest_value(w.now) == doctest::Approx(8 * 2 * 128));
  }
  SUBCASE("who hits it again brings it back") {
    auto again = w.start(text(1, 600));
    w.settle(again);
    w.index.pass(again.hit.lease);
    CHECK(*w.index.lowest_value(w.now) == doctest::Approx(0.5 * 2 * (512 - 64)));
    CHECK(w.probe(text(1, 600)).position == 512);
    CHECK(*w.index.lowest_value(w.now) == doctest::Approx(8 * 2 * 64));  // the head
  }
  SUBCASE("one that is gone is no matter") {
    auto again = w.start(text(1, 600));
    w.settle(again);
    w.give(w.index.evict_snapshots(2, w.now));
    const SnapId same = w.snaps.take().value();
    w.insert(again, 576, {{512, SnapClass::turn}});  // another one in the same place
    w.snaps.give(same);
    w.index.pass(again.hit.lease);
    CHECK(*w.index.lowest_value(w.now) == doctest::Approx(2 * 512));
  }
}

TEST_CASE("snapshots: class, uses and age") {
  World w;
  w.run(text(1, 128), {{128, SnapClass::head}});
  w.run(text(2, 128), {{128, SnapClass::turn}});
  w.run(text(3, 128), {{128, SnapClass::output}});
  w.run(text(4, 128), {{128, SnapClass::interval}});
  const auto left = [&] {
    std::string out;
    for (int32_t i = 1; i <= 4; ++i) out += cached(w, text(i, 128)) == 128 ? cat(i) : "";
    return out;
  };
  CHECK(left() == "1234");
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(64));
  const auto evict_one = [&] {
    w.give(w.index.evict_snapshots(1, w.now));
    w.give(w.index.evict_blocks(2));  // its path: orphans now
  };
  SUBCASE("by class") {
    evict_one();
    CHECK(left() == "123");
    evict_one();
    CHECK(left() == "12");
    evict_one();
    CHECK(left() == "1");
  }
  SUBCASE("uses outweigh a class") {
    for (int i = 0; i < 9; ++i) w.probe(text(4, 128) + Tokens{1});  // 10 uses · 0.5 > 2
    evict_one();
    CHECK(left() == "124");
    evict_one();
    CHECK(left() == "14");
  }
  SUBCASE("age wears uses down") {
    for (int i = 0; i < 9; ++i) w.probe(text(4, 128) + Tokens{1});
    w.now += minutes(120);  // 10 uses are worth 0.6 now
    w.probe(text(2, 128) + Tokens{1});
    w.probe(text(3, 128) + Tokens{1});
    // 1: 8/16, 4: 0.5 · 10/16, 2 and 3 fresh
    evict_one();
    CHECK(left() == "123");
    evict_one();
    CHECK(left() == "23");
  }
  w.check();
}

TEST_CASE("the lowest value tells whether a new snapshot is worth a victim") {
  World w;
  CHECK(w.index.lowest_value(w.now) == std::nullopt);
  w.run(text(1, 128), {{128, SnapClass::divergence}});
  CHECK(*w.index.lowest_value(w.now) == doctest::Approx(128));
  CHECK(*w.index.lowest_value(w.now + kHalfLife) == doctest::Approx(64));
}

TEST_CASE("interval snapshots thin out behind the newest, unless they were hit") {
  World w({false, kHalfLife, 128});
  auto s = w.start(text(1, 2048));
  for (int32_t p = 128; p <= 2048; p += 128) {
    w.insert(s, p, {{p, SnapClass::interval}});
    if (p == 640) CHECK(w.probe(text(1, 650)).position == 640);
  }
  // Blocks of 128: 8 12 14 15 16 stay, and 5, which was hit.
  CHECK(w.index.contents().snaps == 6);
  CHECK(w.probe(text(1, 700)).position == 640);
  CHECK(w.probe(text(1, 1500)).position == 1024);
  CHECK(w.probe(text(1, 1700)).position == 1536);
  CHECK(w.index.counters().snaps_thinned == 10);
  w.check(0);
  w.release(s);
  w.check();
}

TEST_CASE("without snapshots the index holds blocks that go first") {
  World w({}, 10, 1);
  auto s = w.start(text(1, 640));
  w.insert(s, 640);
  w.release(s);
  CHECK(w.pool.available() == 0);
  w.give(w.index.evict_blocks(4));
  CHECK(w.pool.available() == 4);
  w.check();
}

}  // namespace
}  // namespace glm53::prefix
