// Random operations on small pools. A simulated device holds the rows and states; whatever a hit gives must be what the
// request would have computed, and no less than what the oracle finds by looking at everything.
#include <cstdlib>
#include <optional>
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/unit/prefix/oracle.h"

namespace glm53::prefix {
namespace {

constexpr int kBlocks = 48, kSnaps = 10, kOperations = 12000;

class Run {
 public:
  Run(uint64_t seed, bool share)
      : random_(seed), options_{share, kHalfLife, 64}, w_(options_, kBlocks, kSnaps), oracle_(options_) {}

  void operate() {
    w_.now += Time(pick(0, 20000));
    const int what = pick(0, 99);
    if (what < 22)
      start();
    else if (what < 45)
      compute();
    else if (what < 65)
      insert();
    else if (what < 75)
      settle();
    else if (what < 83)
      release();
    else if (what < 87)
      preempt();
    else if (what < 92)
      resume();
    else if (what < 94)
      evict_blocks(static_cast<size_t>(pick(1, 6)));
    else if (what < 97)
      evict_snapshot();
    else if (what < 98 && pick(0, 19) == 0)
      clear();
    else
      probe();
    w_.index.check();
    REQUIRE(w_.index.contents().blocks <= w_.pool.used());
    REQUIRE(w_.snaps.used() == w_.index.contents().snaps);
  }
  /// Everything ends: all that is out is the index's.
  void drain() {
    while (!seqs_.empty()) {
      if (!seqs_.back().settled)
        settle(seqs_.size() - 1);
      else
        release(seqs_.size() - 1);
    }
    w_.check();
  }
  void empty() {
    drain();
    give(w_.index.clear());
    oracle_.cleared();
    preempted_.clear();
    w_.check();
    REQUIRE(w_.index.contents().blocks == 0);
    REQUIRE(w_.index.contents().roots == 0);
  }
  void verify() {
    for (const Seq& s : seqs_)
      if (s.settled) verify_rows(s, s.computed);
  }
  int hits() const { return hits_; }
  int resumed() const { return resumed_; }

 private:
  struct Seq {
    Query q;
    Hit hit;
    std::vector<BlockId> table;
    std::vector<uint64_t> rows;
    int32_t computed = 0;
    bool settled = false, released = false, stale = false;
  };

  int pick(int from, int to) { return std::uniform_int_distribution<int>(from, to)(random_); }

  void give(const Freed& freed) {
    oracle_.freed(freed);
    w_.give(freed);
  }
  std::optional<size_t> any(bool settled) {
    std::vector<size_t> of;
    for (size_t i = 0; i < seqs_.size(); ++i)
      if (seqs_[i].settled == settled && !seqs_[i].released) of.push_back(i);
    if (of.empty()) return std::nullopt;
    return of[static_cast<size_t>(pick(0, static_cast<int>(of.size()) - 1))];
  }
  Tokens some_tokens() {
    Tokens t;
    if (!seen_.empty() && pick(0, 3) != 0) {
      t = seen_[static_cast<size_t>(pick(0, static_cast<int>(seen_.size()) - 1))];
      t.resize(static_cast<size_t>(pick(0, static_cast<int>(t.size()))));
    }
    for (int parts = pick(1, 3); parts > 0; --parts) t.insert(t.end(), static_cast<size_t>(pick(1, 70)), pick(1, 3));
    if (t.size() > 400) t.resize(400);
    if (seen_.size() < 30)
      seen_.push_back(t);
    else
      seen_[static_cast<size_t>(pick(0, 29))] = t;
    return t;
  }
  std::vector<uint64_t> rows_of(const Query& q) const {
    return contents_of(q.tokens, options_.share_output ? static_cast<int32_t>(q.tokens.size()) : q.prompt, q.salt);
  }
  /// Blocks until the table is long enough; false when there are none to be had.
  bool grow(std::vector<BlockId>& table, size_t blocks) {
    while (table.size() < blocks) {
      if (w_.pool.available() == 0) evict_blocks(1);
      const auto b = w_.pool.take();
      if (!b) return false;
      table.push_back(*b);
    }
    return true;
  }

  Hit look(const Query& q, const std::vector<uint64_t>& rows) {
    const int32_t expected = oracle_.best_hit(q);
    const auto [least, most] = oracle_.best_match(q);
    const Prefix p{q.tokens, {}, q.prompt, q.request};
    const Hit hit = w_.index.lookup(q.salt, p, w_.now);
    REQUIRE(hit.position == expected);
    REQUIRE(hit.matched >= least);
    REQUIRE(hit.matched <= most);
    REQUIRE(hit.shared.size() == static_cast<size_t>(hit.position / kBlockTokens));
    REQUIRE((hit.copy != BlockId::null) == (hit.position % kBlockTokens != 0));
    if (hit.position == 0) {
      REQUIRE(hit.restore == SnapId::none);
      return hit;
    }
    ++hits_;
    oracle_.used(hit.restore, w_.now);
    verify_hit(hit, rows);
    return hit;
  }
  void verify_hit(const Hit& hit, const std::vector<uint64_t>& rows) {
    if (hit.position == 0) return;
    REQUIRE(oracle_.state.at(hit.restore) == rows[static_cast<size_t>(hit.position - 1)]);
    for (int32_t p = 0; p < hit.position; ++p) {
      const auto i = static_cast<size_t>(p / kBlockTokens);
      const BlockId b = i < hit.shared.size() ? hit.shared[i] : hit.copy;
      REQUIRE(oracle_.block.at(b)[static_cast<size_t>(p % kBlockTokens)] == rows[static_cast<size_t>(p)]);
    }
  }
  void verify_rows(const Seq& s, int32_t count) {
    for (int32_t p = 0; p < count; ++p)
      REQUIRE(oracle_.block.at(s.table[static_cast<size_t>(p / kBlockTokens)])[static_cast<size_t>(p % kBlockTokens)] ==
              s.rows[static_cast<size_t>(p)]);
  }

  void begin(const Query& q) {
    Seq s;
    s.q = q;
    s.rows = rows_of(q);
    s.hit = look(q, s.rows);
    s.computed = s.hit.position;
    s.settled = s.hit.position == 0;
    s.table = s.hit.shared;
    const bool fits = grow(s.table, blocks_of(q.tokens.size()));
    seqs_.push_back(std::move(s));
    if (!fits) {
      if (seqs_.back().settled)
        release(seqs_.size() - 1);
      else
        abandon(seqs_.size() - 1);
    }
  }
  void start() {
    if (seqs_.size() >= 4) return;
    const Tokens t = some_tokens();
    const auto prompt = pick(0, 1) == 0 ? static_cast<int32_t>(t.size()) : pick(1, static_cast<int>(t.size()));
    // A new request looks for its prompt only; what it generates comes in compute().
    Query q{first(t, prompt), prompt, 0, pick(0, 4) == 0 ? "salt" : ""};
    begin(q);
  }
  void compute() {
    const auto at = any(true);
    if (!at) return;
    Seq& s = seqs_[*at];
    if (s.computed == static_cast<int32_t>(s.q.tokens.size())) {
      const Tokens more(static_cast<size_t>(pick(1, 40)), pick(1, 3));
      if (s.q.tokens.size() + more.size() > 450) return;
      if (!grow(s.table, blocks_of(s.q.tokens.size() + more.size()))) return;
      s.q.tokens = s.q.tokens + more;
      s.rows = rows_of(s.q);
    }
    const int32_t to = pick(s.computed, static_cast<int>(s.q.tokens.size()));
    for (int32_t p = s.computed; p < to; ++p)
      oracle_.block[s.table[static_cast<size_t>(p / kBlockTokens)]][static_cast<size_t>(p % kBlockTokens)] =
          s.rows[static_cast<size_t>(p)];
    s.computed = to;
  }
  void insert() {
    if (const auto at = any(true)) insert(seqs_[*at], 0, {});
  }
  void insert(Seq& s, uint64_t request, std::vector<int32_t> at) {
    if (s.computed == 0) return;
    static constexpr SnapClass kClasses[] = {SnapClass::head, SnapClass::turn, SnapClass::output, SnapClass::interval,
                                             SnapClass::divergence};
    for (int n = pick(0, 2); n > 0; --n) {
      int32_t p = pick(1, s.computed);
      if (pick(0, 1) == 0) p = std::max(1, p / kBlockTokens * kBlockTokens);
      at.push_back(p);
    }
    std::vector<NewSnapshot> snaps;
    for (const int32_t p : at) {
      if (w_.snaps.available() == 0) evict_snapshot();
      const auto id = w_.snaps.take();
      if (!id) break;
      oracle_.state[*id] = s.rows[static_cast<size_t>(p - 1)];
      snaps.push_back({p, *id, kClasses[pick(0, 4)]});
    }
    if (pick(0, 2) == 0) {
      w_.index.pass(s.hit.lease);
      oracle_.passed(s.hit.restore);
    }
    Query q = s.q;
    q.request = request;
    const std::span<const int32_t> done(s.q.tokens.data(), static_cast<size_t>(s.computed));
    if (!s.stale) oracle_.inserted(q, s.computed, s.table, snaps, w_.now);
    const Freed freed = w_.index.insert(s.hit.lease, {{done, {}, s.q.prompt, request}, s.table, snaps}, w_.now);
    for (const SnapId id : freed.snaps)
      oracle_.surplus(id, std::any_of(snaps.begin(), snaps.end(), [id](const NewSnapshot& n) {
                        return n.id == id && n.cls != SnapClass::interval;
                      }));
    give(freed);
  }
  void settle() {
    std::vector<size_t> open;
    for (size_t i = 0; i < seqs_.size(); ++i)
      if (!seqs_[i].settled) open.push_back(i);
    if (!open.empty()) settle(open[static_cast<size_t>(pick(0, static_cast<int>(open.size()) - 1))]);
  }
  void settle(size_t at) {
    Seq& s = seqs_[at];
    verify_hit(s.hit, s.rows);  // nobody took it meanwhile
    if (s.hit.copy != BlockId::null && s.table.size() > s.hit.shared.size())
      oracle_.block[s.table[s.hit.shared.size()]] = oracle_.block.at(s.hit.copy);
    give(w_.index.settle(s.hit.lease));
    s.settled = true;
    if (s.released) seqs_.erase(seqs_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void abandon(size_t at) {  // before it was settled
    Seq& s = seqs_[at];
    const Freed freed = w_.index.release(s.hit.lease, s.table);
    REQUIRE(freed.blocks.empty());
    s.released = true;
  }
  void release() {
    if (const auto at = any(pick(0, 3) != 0)) seqs_[*at].settled ? release(*at) : abandon(*at);
  }
  void release(size_t at) {
    Seq& s = seqs_[at];
    give(w_.index.release(s.hit.lease, s.table));
    const uint64_t request = s.q.request;
    seqs_.erase(seqs_.begin() + static_cast<std::ptrdiff_t>(at));
    if (request != 0) give(w_.index.forget(request));
  }
  void preempt() {
    const auto at = any(true);
    if (!at || seqs_[*at].computed == 0) return;
    Seq& s = seqs_[*at];
    const uint64_t request = s.q.request != 0 ? s.q.request : ++requests_;
    insert(s, request, {s.computed});
    give(w_.index.release(s.hit.lease, s.table));
    s.q.request = request;
    preempted_.push_back(s.q);
    seqs_.erase(seqs_.begin() + static_cast<std::ptrdiff_t>(*at));
  }
  void resume() {
    if (preempted_.empty() || seqs_.size() >= 5) return;
    const auto at = static_cast<size_t>(pick(0, static_cast<int>(preempted_.size()) - 1));
    const Query q = preempted_[at];
    preempted_.erase(preempted_.begin() + static_cast<std::ptrdiff_t>(at));
    if (pick(0, 4) == 0) return give(w_.index.forget(q.request));  // cancelled while it waited
    begin(q);
    ++resumed_;
  }
  void probe() {
    const Tokens t = some_tokens();
    const Query q{t, static_cast<int32_t>(t.size()), 0, ""};
    const Hit hit = look(q, rows_of(q));
    give(w_.index.settle(hit.lease));
    give(w_.index.release(hit.lease, hit.shared));
  }

  void evict_blocks(size_t want) {
    const size_t evictable = w_.index.contents().evictable;
    const Freed freed = w_.index.evict_blocks(want);
    REQUIRE(freed.blocks.size() == std::min(want, evictable));
    for (const Seq& s : seqs_)
      for (const BlockId b : freed.blocks) REQUIRE(std::find(s.table.begin(), s.table.end(), b) == s.table.end());
    give(freed);
  }
  void evict_snapshot() {
    std::set<SnapId> pinned;
    for (const Seq& s : seqs_)
      if (!s.settled) pinned.insert(s.hit.restore);
    const auto lowest = w_.index.lowest_value(w_.now);
    const Freed freed = w_.index.evict_snapshots(1, w_.now);
    REQUIRE(freed.blocks.empty());
    REQUIRE(freed.snaps.size() == (lowest ? 1 : 0));
    for (const SnapId victim : freed.snaps) {
      REQUIRE(!pinned.contains(victim));
      REQUIRE(oracle_.knows(victim));
      const double least = oracle_.worth(victim, w_.now).first;
      for (const SnapId other : oracle_.snapshots())
        if (!pinned.contains(other)) REQUIRE(least <= oracle_.worth(other, w_.now).second * (1 + 1e-9));
    }
    if (!lowest)
      for (const SnapId other : oracle_.snapshots()) REQUIRE(pinned.contains(other));
    give(freed);
  }
  void clear() {
    give(w_.index.clear());
    oracle_.cleared();
    for (Seq& s : seqs_) s.stale = true;
  }

  std::mt19937_64 random_;
  const Options options_;
  World w_;
  Oracle oracle_;
  std::vector<Seq> seqs_;
  std::vector<Query> preempted_;
  std::vector<Tokens> seen_;
  uint64_t requests_ = 0;
  int hits_ = 0, resumed_ = 0;
};

void run(uint64_t seed, bool share) {
  CAPTURE(seed);
  CAPTURE(share);
  Run run(seed, share);
  for (int i = 0; i < kOperations; ++i) {
    CAPTURE(i);
    run.operate();
    if (i % 20 == 0) run.verify();
    if (i % 500 == 499) run.drain();
  }
  run.empty();
  CHECK(run.hits() > kOperations / 20);
  CHECK(run.resumed() > 20);
}

TEST_CASE("random operations against the oracle") {
  std::vector<uint64_t> seeds{1, std::random_device{}()};
  if (const char* given = std::getenv("GLM53_TEST_SEED")) seeds = {static_cast<uint64_t>(parse_int(given).value())};
  for (const uint64_t seed : seeds) {
    MESSAGE(cat("seed ", seed));
    run(seed, false);
    run(seed, true);
  }
}

}  // namespace
}  // namespace glm53::prefix
