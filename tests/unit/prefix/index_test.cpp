#include <doctest/doctest.h>

#include "common/error.h"
#include "tests/unit/prefix/world.h"

namespace glm53::prefix {
namespace {

TEST_CASE("an empty index hits nothing and keeps nothing") {
  World w;
  auto s = w.start(text(1, 200));
  CHECK(s.hit.position == 0);
  CHECK(s.hit.matched == 0);
  CHECK(s.hit.restore == SnapId::none);
  w.check(4);
  w.settle(s);
  w.release(s);
  CHECK(w.index.contents().roots == 0);
  w.check();
  CHECK_THROWS_AS(w.index.release(s.hit.lease, s.table), Error);
  CHECK_THROWS_AS(w.index.settle(s.hit.lease), Error);
}

TEST_CASE("a hit is the deepest snapshot within what matches") {
  World w;
  const Tokens a = text(1, 640);
  w.run(a, {{128, SnapClass::head}, {512, SnapClass::turn}});
  w.check();
  CHECK(w.probe(a).position == 512);
  CHECK(w.probe(a).matched == 640);
  const Hit hit = w.probe(first(a, 300) + text(2, 300));
  CHECK(hit.position == 128);
  CHECK(hit.matched == 300);
  CHECK(hit.shared.size() == 2);
  CHECK(hit.copy == BlockId::null);
  CHECK(w.probe(first(a, 100) + text(2, 300)).position == 0);
  CHECK(w.probe(first(a, 100) + text(2, 300)).matched == 100);
  CHECK(w.probe(text(2, 300)).matched == 0);
  CHECK(w.probe(first(a, 30)).matched == 30);
  CHECK(w.probe({}).matched == 0);
}

TEST_CASE("blocks without a snapshot are no hit") {
  World w;
  w.run(text(1, 640), {});
  const Hit hit = w.probe(text(1, 640));
  CHECK(hit.position == 0);
  CHECK(hit.matched == 640);
  CHECK(hit.shared.empty());
}

TEST_CASE("a hit inside a block shares what is before and copies it") {
  World w;
  w.run(text(1, 150), {{150, SnapClass::output}});
  const Hit hit = w.probe(text(1, 150) + text(2, 10));
  CHECK(hit.position == 150);
  CHECK(hit.shared.size() == 2);
  CHECK(hit.copy != BlockId::null);
  CHECK(w.probe(text(1, 149) + text(2, 10)).position == 0);
  CHECK(w.probe(text(1, 149) + text(2, 10)).matched == 149);
  CHECK(w.probe(text(1, 150)).position == 0);  // one token must be left
}

TEST_CASE("snapshots inside siblings are found whichever sibling matches further") {
  World w;
  const Tokens a = text(1, 50) + text(2, 14), b = text(1, 50) + text(3, 14) + text(4, 64);
  w.run(a, {{40, SnapClass::output}});
  w.run(b, {});
  const Hit hit = w.probe(b + text(5, 9));
  CHECK(hit.position == 40);
  CHECK(hit.matched == 128);
  CHECK(hit.shared.empty());
}

TEST_CASE("salts keep paths apart, in lookups and in duplicates") {
  World w;
  const Tokens a = text(1, 128) + text(2, 5);
  w.run(a, {{128, SnapClass::turn}}, "alice");
  CHECK(w.probe(a, "alice").position == 128);
  CHECK(w.probe(a, "bob").matched == 0);
  CHECK(w.probe(a).matched == 0);
  w.run(a, {{128, SnapClass::turn}}, "bob");
  CHECK(w.index.contents().blocks == 4);
  CHECK(w.index.contents().roots == 2);
  CHECK(w.probe(a, "bob").shared != w.probe(a, "alice").shared);
  w.give(w.index.evict_blocks(100));
  CHECK(w.index.contents().roots == 0);
  w.check();
}

TEST_CASE("lookups with a salt nobody used leave no root behind") {
  World w;
  for (int i = 0; i < 100; ++i) w.probe(text(1, 100), cat("salt ", i));
  CHECK(w.index.contents().roots == 0);
}

TEST_CASE("concurrent identical prefixes keep one copy") {
  World w;
  const Tokens a = text(1, 256);
  auto x = w.start(a), y = w.start(a);
  w.insert(x, 128, {{128, SnapClass::head}});
  w.insert(y, 192, {{128, SnapClass::turn}, {192, SnapClass::turn}});
  w.insert(x, 256);
  CHECK(w.index.contents().blocks == 4);
  CHECK(w.index.contents().snaps == 2);
  CHECK(w.index.counters().snaps_surplus == 1);
  w.check(4);  // each has blocks of its own besides: x the third, y the first two and the fourth
  w.release(y);
  w.check(1);
  w.release(x);
  w.check();
  CHECK(w.probe(a + text(2, 3)).position == 192);
}

TEST_CASE("a sequence can be hit while it goes on") {
  World w;
  auto x = w.start(text(1, 640));
  w.insert(x, 128, {{128, SnapClass::head}});
  auto y = w.start(text(1, 128) + text(2, 64));
  CHECK(y.hit.position == 128);
  CHECK(y.hit.shared == std::vector<BlockId>{x.table[0], x.table[1]});
  w.release(x);
  w.check(3 - 2);
  CHECK(w.index.evict_blocks(100).blocks.empty());  // y reads both
  w.settle(y);
  w.release(y);
  w.check();
}

TEST_CASE("a partial block grows with its sequence") {
  World w;
  auto s = w.start(text(1, 100));
  w.insert(s, 100, {{100, SnapClass::turn}});
  CHECK(w.index.contents().blocks == 2);
  w.append(s, text(2, 100));
  s.prompt = 200;
  w.insert(s, 200, {{192, SnapClass::turn}});
  CHECK(w.index.contents().blocks == 3);
  CHECK(w.probe(text(1, 100) + text(3, 1)).position == 100);
  CHECK(w.probe(text(1, 100) + text(2, 100)).position == 192);
  w.check(1);
  w.release(s);
  w.check();
}

TEST_CASE("a fuller block replaces a partial one and takes its snapshots") {
  World w;
  w.run(text(1, 100), {{100, SnapClass::output}});
  auto s = w.start(text(1, 100) + text(2, 28));
  CHECK(s.hit.position == 100);
  w.insert(s, 128);  // still pinned: both stay
  CHECK(w.index.contents().blocks == 3);
  w.settle(s);
  w.check(0);
  w.release(s);
  w.run(text(1, 100) + text(2, 20), {{120, SnapClass::output}});  // covered by the full one
  CHECK(w.index.contents().blocks == 3);
  CHECK(w.probe(text(1, 100) + text(2, 28)).position == 120);
  w.run(text(1, 100) + text(3, 28), {});  // the partial one is a prefix of this
  CHECK(w.index.contents().blocks == 3);
  CHECK(w.probe(text(1, 100) + text(3, 28)).position == 100);
  w.check();
}

TEST_CASE("a partial block that turns out to be known becomes its sequence's own again") {
  World w;
  auto s = w.start(text(1, 64));
  w.insert(s, 40, {{40, SnapClass::output}});
  w.run(text(1, 64), {});  // does not replace a block in use
  CHECK(w.index.contents().blocks == 2);
  w.insert(s, 64);
  CHECK(w.index.contents().blocks == 1);
  w.check(1);
  CHECK(w.probe(text(1, 64)).position == 40);
  w.release(s);
  w.check();
}

TEST_CASE("a partial block that somebody copies stays, known or not") {
  World w;
  auto s = w.start(text(1, 64));
  w.insert(s, 40, {{40, SnapClass::output}});
  w.run(text(1, 64), {});
  auto reader = w.start(text(1, 40) + text(2, 1));
  REQUIRE(reader.hit.copy == s.table[0]);
  w.insert(s, 64);
  CHECK(w.index.contents().blocks == 2);
  const Freed none = w.index.release(s.hit.lease, s.table);
  CHECK(none.blocks.empty());
  w.give(w.index.evict_blocks(100));
  CHECK(w.index.contents().blocks == 1);
  w.check(1);
  w.settle(reader);
  w.release(reader);
  w.give(w.index.evict_blocks(100));
  CHECK(w.pool.used() == 0);
  w.check();
}

TEST_CASE("the tail of a sequence is registered only for a snapshot in it") {
  World w;
  w.run(text(1, 100), {{64, SnapClass::turn}});
  CHECK(w.index.contents().blocks == 1);
  w.check();
}

TEST_CASE("arguments that contradict are refused and change nothing") {
  World w;
  auto s = w.start(text(1, 128));
  auto other = w.start(text(1, 128));
  w.insert(s, 128);
  const std::vector<BlockId> stolen{s.table[0], other.table[1]}, twice{other.table[0], other.table[0]},
      null{BlockId::null, other.table[1]};
  for (const auto& table : {stolen, twice, null}) {
    CHECK_THROWS_AS(w.index.insert(other.hit.lease, {w.prefix(other, 128), table}, w.now), Error);
    CHECK_THROWS_AS(w.index.release(other.hit.lease, table), Error);
  }
  CHECK_THROWS_AS(w.index.insert(other.hit.lease, {w.prefix(other, 128), std::span(other.table).first(1)}, w.now),
                  Error);
  for (const NewSnapshot& bad :
       {NewSnapshot{0, SnapId{5}, SnapClass::turn}, NewSnapshot{129, SnapId{5}, SnapClass::turn},
        NewSnapshot{64, SnapId::none, SnapClass::turn}})
    CHECK_THROWS_AS(w.index.insert(other.hit.lease, {w.prefix(other, 128), other.table, {bad}}, w.now), Error);
  CHECK_THROWS_AS(w.index.release(LeaseId{77}, {}), Error);
  CHECK_THROWS_AS(Index({false, Time(0), 64}), Error);
  w.check(2);
  w.release(other);
  w.release(s);
  w.check();
}

TEST_CASE("insertions look at what is new, however long the path") {
  constexpr int32_t kLong = 1 << 20, kPiece = 512, kInterval = 8192;
  World w({false, kHalfLife, kInterval}, 2 * kLong / kBlockTokens + 1, 64);
  const uint64_t blocks = kLong / kBlockTokens, pieces = kLong / kPiece;
  const auto read = [&](World::Seq& s) {
    for (int32_t p = kPiece; p <= kLong; p += kPiece) {
      if (p % kInterval == 0)
        w.insert(s, p, {{p, SnapClass::interval}});
      else
        w.insert(s, p);
    }
  };
  auto s = w.start(text(1, kLong));
  read(s);
  CHECK(w.index.contents().blocks == blocks);
  // Each interval looks at those that are left of the ones before: the logarithm of their number, and some.
  const uint64_t most = blocks + pieces + 16 * kLong / kInterval;
  CHECK(w.index.counters().walked <= most);
  CHECK(w.index.contents().snaps <= 10);

  // A second one of the same text, whose own blocks stay its own.
  auto twin = w.start(text(1, kLong));
  w.settle(twin);
  const uint64_t before = w.index.counters().walked;
  read(twin);
  CHECK(w.index.counters().walked - before <= most);
  w.check(twin.table.size() - twin.hit.shared.size());
  w.release(twin);
  w.release(s);
  w.check();
}

TEST_CASE("what others registered may go while a sequence that knew it goes on") {
  World w;
  auto s = w.start(text(1, 1024));
  {
    auto other = w.start(text(1, 512));
    w.insert(other, 512, {{512, SnapClass::turn}});
    w.insert(s, 512);  // its own blocks stay its own
    w.release(other);
  }
  w.give(w.index.evict_blocks(3));
  w.insert(s, 640);  // and are registered now, as far as they are missing
  CHECK(w.index.contents().blocks == 10);
  w.insert(s, 1024, {{1024, SnapClass::turn}});
  w.check(5);
  w.release(s);
  w.check();
  CHECK(w.probe(text(1, 1024) + Tokens{1}).position == 1024);
}

TEST_CASE("counters count tokens") {
  World w;
  w.run(text(1, 640), {{512, SnapClass::turn}});
  w.probe(text(1, 600));
  w.probe(text(2, 60));
  const Counters& c = w.index.counters();
  CHECK(c.lookups == 3);
  CHECK(c.hits == 1);
  CHECK(c.query_tokens == 640 + 600 + 60);
  CHECK(c.hit_tokens == 512);
  CHECK(c.blocks_inserted == 10);
  CHECK(c.snaps_inserted == 1);
}

TEST_CASE("clear forgets at once, and what is in use comes back with its release") {
  World w;
  const Tokens a = text(1, 256);
  w.run(a, {{128, SnapClass::head}, {256, SnapClass::turn}});
  w.run(text(2, 64), {}, "salt");
  auto s = w.start(first(a, 128) + text(3, 128));
  CHECK(s.hit.position == 128);
  w.give(w.index.clear());
  CHECK(w.index.contents().blocks == 2);
  CHECK(w.index.contents().snaps == 1);  // pinned
  w.index.check();
  CHECK(w.probe(a).matched == 0);
  w.insert(s, 256, {{256, SnapClass::turn}});  // nobody wants it any more
  CHECK(w.index.contents().blocks == 2);
  w.run(a, {{256, SnapClass::turn}});  // a new path beside the old one
  CHECK(w.probe(a + text(4, 1)).position == 256);
  SUBCASE("settled first") {
    w.settle(s);
    w.release(s);
  }
  SUBCASE("released first") {
    w.release(s);
    w.settle(s);
  }
  CHECK(w.index.contents().blocks == 4);
  CHECK(w.index.contents().roots == 1);
  w.check();
}

}  // namespace
}  // namespace glm53::prefix
