// The ways in which prefix caches go wrong that an index alone can show (numbers as in docs/prefix-cache.md).
#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/prefix/chain_hash.h"
#include "tests/unit/prefix/world.h"

namespace glm53::prefix {
namespace {

TEST_CASE("trap: a hit on tokens whose state is not exactly there") {
  World w;
  w.run(text(1, 640), {{320, SnapClass::turn}});
  for (const int32_t n : {319, 320, 321, 384, 640}) {
    const Hit hit = w.probe(first(text(1, 640), n) + text(2, 5));
    CHECK(hit.position == (n >= 320 ? 320 : 0));
    CHECK((hit.restore == SnapId::none) == (hit.position == 0));
    CHECK(hit.shared.size() == static_cast<size_t>(hit.position / 64));
  }
}

TEST_CASE("trap: a snapshot of a state that contains rows nobody accepted") {
  World w;
  auto s = w.start(text(1, 64));
  w.append(s, text(2, 16));  // drafts
  SnapId snap = w.snaps.take().value();
  CHECK_THROWS_AS(w.index.insert(s.hit.lease, {w.prefix(s, 64), s.table, {{70, snap, SnapClass::output}}}, w.now),
                  Error);
  w.snaps.give(snap);
  w.release(s);
  w.check();
}

TEST_CASE("trap: the whole prompt is cached, and no token is left to compute") {
  World w;
  const Tokens a = text(1, 256);
  w.run(a, {{128, SnapClass::head}, {256, SnapClass::turn}});
  CHECK(w.probe(a).position == 128);
  CHECK(w.probe(a).matched == 256);
  CHECK(w.probe(a + Tokens{1}).position == 256);
}

TEST_CASE("trap: a shared block is appended to") {
  World w;
  w.run(text(1, 100), {{100, SnapClass::output}});
  auto x = w.start(text(1, 100) + text(2, 100)), y = w.start(text(1, 100) + text(3, 100));
  for (const auto* s : {&x, &y}) {
    CHECK(s->hit.position == 100);
    CHECK(s->hit.shared.size() == 1);
    CHECK(s->table[1] != s->hit.copy);
    CHECK(std::count(s->hit.shared.begin(), s->hit.shared.end(), s->hit.copy) == 0);
  }
  CHECK(x.hit.copy == y.hit.copy);
  CHECK(x.table[1] != y.table[1]);
  for (auto* s : {&x, &y}) {
    w.settle(*s);
    w.insert(*s, 200);
    w.release(*s);
  }
  w.check();
  CHECK(w.probe(text(1, 100) + text(3, 100)).matched == 192);
}

TEST_CASE("trap: equal tokens, different images") {
  World w;
  const Tokens t = text(1, 30) + Tokens(100, 7) + text(2, 62);
  const std::vector<Media> cats{{30, 100, "cat"}}, dogs{{30, 100, "dog"}}, later{{31, 100, "cat"}};
  w.run(t, {{192, SnapClass::turn}}, "", cats);
  const Tokens more = t + text(3, 5);
  CHECK(w.probe(more, "", cats).position == 192);
  CHECK(w.probe(more, "", dogs).matched == 30);
  CHECK(w.probe(more, "", dogs).position == 0);
  CHECK(w.probe(more, "", later).matched == 30);
  CHECK(w.probe(more).matched == 30);
  w.run(t, {{192, SnapClass::turn}}, "", dogs);
  CHECK(w.index.contents().blocks == 6);
  CHECK(w.probe(more, "", dogs).position == 192);
  CHECK(w.probe(more, "", dogs).restore != w.probe(more, "", cats).restore);
  // Two images that meet in a block: the second differs.
  const std::vector<Media> ab{{30, 50, "a"}, {80, 50, "b"}}, ac{{30, 50, "a"}, {80, 50, "c"}};
  w.run(t, {{128, SnapClass::turn}}, "", ab);
  CHECK(w.probe(more, "", ac).matched == 80);
  // One image, or its beginning and then the whole of it.
  const std::vector<Media> one{{30, 100, "a"}}, again{{30, 20, "a"}, {50, 80, "a"}};
  w.run(t, {{192, SnapClass::turn}}, "salt", one);
  CHECK(w.probe(more, "salt", again).matched == 50);
  w.check();
}

TEST_CASE("trap: other weights, other formats") {
  // Within one index there is one model; between processes the names of blocks differ.
  const CacheIdentity plain{"rev", "digest", "bf16", 4, 512}, edited{"rev", "digest of edited", "bf16", 4, 512};
  const Tokens t = text(1, 64);
  const Prefix p{t, {}, 64, 0};
  CHECK(chain_of(chain_root(plain, ""), p) != chain_of(chain_root(edited, ""), p));
}

TEST_CASE("trap: a snapshot is found before it is written") {
  World w;
  auto x = w.start(text(1, 256));
  w.insert(x, 64);  // the step that computes 64 … 256 and saves the state at 128 is under way
  CHECK(w.probe(text(1, 256)).position == 0);
  CHECK(w.probe(text(1, 256)).matched == 64);
  w.insert(x, 256, {{128, SnapClass::turn}});
  CHECK(w.probe(text(1, 256)).position == 128);
  w.release(x);
  w.check();
}

TEST_CASE("trap: an aborted prefill registers what it never computed") {
  World w;
  auto x = w.start(text(1, 640));
  w.insert(x, 200, {{192, SnapClass::interval}});  // aborted behind the piece that ended at 200
  w.release(x);
  w.check();
  CHECK(w.index.contents().blocks == 3);
  CHECK(w.probe(text(1, 640)).matched == 192);
  CHECK(w.probe(text(1, 640)).position == 192);
}

TEST_CASE("trap: blocks come free while a copy or restore from or to them is in flight") {
  World w;
  w.run(text(1, 100), {{100, SnapClass::output}});
  auto x = w.start(text(1, 100) + text(2, 100));
  REQUIRE(x.hit.position == 100);
  const Freed at_once = w.index.release(x.hit.lease, x.table);  // cancelled at once
  CHECK(at_once.blocks.empty());
  CHECK(w.index.evict_blocks(100).blocks.empty());
  CHECK(w.index.evict_snapshots(100, w.now).snaps.empty());
  CHECK(w.index.lowest_value(w.now) == std::nullopt);
  CHECK(w.index.contents().pinned_snaps == 1);
  CHECK_THROWS_AS(w.index.release(x.hit.lease, x.table), Error);
  CHECK_THROWS_AS(w.index.insert(x.hit.lease, {w.prefix(x, 200), x.table}, w.now), Error);
  w.check(3);
  w.settle(x);
  w.check();
  w.give(w.index.evict_blocks(100));
  CHECK(w.index.contents().blocks == 0);
  w.check();
}

TEST_CASE("trap: requests that want every prompt token's logits read the cache") {
  World w;
  w.run(text(1, 256), {{128, SnapClass::turn}});
  World::Seq s;
  s.tokens = text(1, 256);
  s.prompt = 256;
  s.hit.lease = w.index.open("");
  while (s.table.size() < 4) s.table.push_back(w.pool.take().value());
  w.insert(s, 256, {{192, SnapClass::turn}});  // may write all the same
  w.release(s);
  w.check();
  CHECK(w.index.counters().lookups == 1);
  CHECK(w.probe(text(1, 256)).position == 192);
}

TEST_CASE("trap: generated rows are taken for a prompt's") {
  for (const bool share : {false, true}) {
    CAPTURE(share);
    World w({share, kHalfLife, 0});
    auto s = w.start(text(1, 100));
    w.append(s, text(2, 100));
    w.insert(s, 200, {{64, SnapClass::turn}, {200, SnapClass::output}});
    w.release(s);
    w.check();
    const Tokens next = text(1, 100) + text(2, 100) + text(3, 50);
    CHECK(w.probe(next).position == (share ? 200 : 64));
    CHECK(w.probe(next).matched == (share ? 200 : 64));
    CHECK(w.index.contents().blocks == (share ? 4 : 1));
  }
}

TEST_CASE("trap: a resumed request takes rows that came out of other kernels") {
  World w;
  const Tokens prompt = text(1, 100), all = prompt + text(2, 100);
  auto x = w.start(prompt);
  w.append(x, text(2, 100));
  w.insert(x, 200, {{64, SnapClass::turn}, {200, SnapClass::interval}}, 9);  // preempted
  w.release(x);
  w.check();
  CHECK(w.index.contents().blocks == 4);
  // Somebody's prompt with the same tokens: neither finds the other's.
  CHECK(w.probe(all + text(3, 1)).position == 64);
  w.run(all, {{192, SnapClass::turn}});
  CHECK(w.index.contents().blocks == 6);
  CHECK(w.probe(all + text(3, 1)).position == 192);
  // A third request with other output, then the owner.
  auto other = w.resume(all + Tokens{5}, 100, 10);
  CHECK(other.hit.position == 64);
  CHECK(other.hit.matched == 100);  // prompt rows in the block with output
  w.settle(other);
  w.release(other);
  auto again = w.resume(all + Tokens{5}, 100, 9);
  CHECK(again.hit.position == 200);
  CHECK(again.hit.shared.size() == 3);
  CHECK(again.hit.copy == x.table[3]);
  w.settle(again);
  w.insert(again, 201);  // finished: nothing more for anybody
  w.release(again);
  w.check();
  w.give(w.index.forget(9));
  CHECK(w.index.contents().blocks == 3);
  w.check();
  auto gone = w.resume(all + Tokens{5}, 100, 9);
  CHECK(gone.hit.position == 64);
  w.settle(gone);
  w.release(gone);
  w.check();
}

}  // namespace
}  // namespace glm53::prefix
