// What the index says of things that it evicts, and how what comes back finds its place.
#include <doctest/doctest.h>

#include "engine/prefix/chain_hash.h"
#include "tests/unit/prefix/world.h"

using namespace glm53;
using namespace glm53::prefix;

namespace {

const CacheIdentity kIdentity{.model_revision = "m", .weights_digest = "w", .kv_format = "f", .kpool = 4, .topk = 8};

Options naming() {
  Options o;
  o.identity = kIdentity;
  return o;
}

/// Registers so many tokens of a text with snapshots at these positions, and lets go of it.
void keep(World& w, const Tokens& tokens, const std::vector<int32_t>& snaps, const std::string& salt = "") {
  World::Seq s = w.start(tokens, salt);
  w.give(w.index.settle(s.hit.lease));
  std::vector<NewSnapshot> fresh;
  for (const int32_t position : snaps) fresh.push_back({position, w.snaps.take().value(), SnapClass::turn});
  w.give(w.index.insert(s.hit.lease, {w.prefix(s, static_cast<int32_t>(tokens.size())), s.table, fresh}, Time{0}));
  w.give(w.index.release(s.hit.lease, s.table));
}

std::vector<ChainHash> names_of(const Tokens& tokens, const std::string& salt = "") {
  return chain_of(chain_root(kIdentity, salt), {.tokens = tokens, .prompt = static_cast<int32_t>(tokens.size())});
}

}  // namespace

TEST_CASE("evicted snapshots and the blocks before them have the names of their prefixes") {
  World w(naming());
  const Tokens tokens = text(1, 300);  // four whole blocks
  keep(w, tokens, {128}, "salt");
  const auto names = names_of(tokens, "salt");
  const Freed snaps = w.index.evict_snapshots(1, Time{1});
  REQUIRE(snaps.evicted.size() == 1);
  CHECK(snaps.evicted[0].snap == snaps.snaps[0]);
  CHECK(snaps.evicted[0].block == BlockId::null);
  CHECK(snaps.evicted[0].cls == SnapClass::turn);
  CHECK(snaps.evicted[0].position == 128);
  CHECK(snaps.evicted[0].name == names[1]);
  // Behind the snapshot, blocks are of no use to anybody.
  const Freed blocks = w.index.evict_blocks(100);
  CHECK(blocks.blocks.size() == 4);
  REQUIRE(blocks.evicted.size() == 2);
  for (const Evicted& e : blocks.evicted) {
    const auto at = static_cast<size_t>(e.position / kBlockTokens - 1);
    CHECK(e.name == names.at(at));
    CHECK(std::equal(e.tokens.begin(), e.tokens.end(), tokens.begin() + static_cast<ptrdiff_t>(at * kBlockTokens)));
    CHECK(std::count(blocks.blocks.begin(), blocks.blocks.end(), e.block) == 1);
  }
  w.index.check();
}

TEST_CASE("a block that goes with its snapshot names both; without an identity nothing has a name") {
  for (const bool named : {true, false}) {
    World w(named ? naming() : Options{});
    keep(w, text(1, 128), {64, 128});
    const Freed all = w.index.evict_blocks(100);
    CHECK(all.blocks.size() == 2);
    CHECK(all.evicted.size() == (named ? 4 : 0));
  }
}

TEST_CASE("what is only one request's, partial, or to be forgotten has no name") {
  World w(naming());
  SUBCASE("a snapshot inside a block") {
    keep(w, text(1, 100), {100});
    CHECK(w.index.evict_blocks(100).evicted.empty());
  }
  SUBCASE("generated rows of a request that was put back") {
    World::Seq s = w.resume(text(1, 256), 64, 7);
    w.give(w.index.settle(s.hit.lease));
    const SnapId snap = w.snaps.take().value();
    w.give(w.index.insert(s.hit.lease, {w.prefix(s, 256, 7), s.table, {{256, snap, SnapClass::interval}}}, Time{0}));
    w.give(w.index.release(s.hit.lease, s.table));
    CHECK(w.index.evict_blocks(100).evicted.empty());
  }
  SUBCASE("a reset") {
    keep(w, text(1, 256), {256});
    CHECK(w.index.clear().evicted.empty());
  }
}

TEST_CASE("hold_path finds whole blocks without a snapshot, and holds them") {
  World w(naming());
  const Tokens tokens = text(1, 300);
  keep(w, tokens, {128});
  const Prefix prefix{.tokens = tokens, .prompt = 300};
  const Hit hit = w.index.hold_path("", prefix);
  CHECK(hit.shared.size() == 4);
  CHECK(hit.matched == 256);
  CHECK(hit.position == 128);
  CHECK(hit.restore == SnapId::none);
  w.index.check();
  CHECK(w.index.evict_blocks(100).blocks.empty());
  CHECK(w.index.evict_snapshots(1, Time{1}).snaps.size() == 1);
  // A snapshot comes back to where the blocks are still.
  const SnapId snap = w.snaps.take().value();
  Prefix complete = prefix;
  complete.tokens = complete.tokens.first(192);
  w.give(w.index.insert(hit.lease, {complete, hit.shared, {{192, snap, SnapClass::turn}}}, Time{2}));
  w.give(w.index.release(hit.lease, hit.shared));
  w.index.check();
  CHECK(w.start(tokens).hit.position == 192);
  const Hit other = w.index.hold_path("other", prefix);
  CHECK(other.shared.empty());
  w.give(w.index.release(other.lease, other.shared));
}
