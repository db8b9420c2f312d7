// Random schedules on the model of the repository: whatever comes, each request gets the tokens that it gets alone.
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/unit/runtime/tiny_server.h"

using namespace glm53;
using namespace glm53::test;

namespace {

constexpr int kSchedules = 50, kPool = 30, kMostTokens = 10;

/// Requests of all kinds, with the tokens that each gets in a server of its own.
struct Pool {
  std::vector<wire::Submit> requests;
  std::vector<Tokens> alone;
};

/// Prompts share beginnings, so that there is something to find in the cache.
Pool make_pool(Server& s, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const std::vector<Sample> all = samples();
  std::vector<Tokens> texts;
  for (int i = 0; i < 3; ++i) {
    Tokens text;
    while (text.size() < 400) {
      const Sample& sample = all[below(all.size())];
      text.insert(text.end(), sample.prompt.begin(), sample.prompt.end());
    }
    texts.push_back(std::move(text));
  }
  Pool pool;
  for (int i = 0; i < kPool; ++i) {
    const Tokens& text = texts[below(texts.size())];
    const size_t size = 1 + below(below(3) == 0 ? 220 : 80);
    wire::Submit r =
        request(static_cast<uint64_t>(i) + 1, Tokens(text.begin(), text.begin() + static_cast<ptrdiff_t>(size)),
                1 + static_cast<int32_t>(below(kMostTokens)));
    r.boundaries = {static_cast<int32_t>(below(size + 1))};
    if (below(3) == 0) r.sampling.temperature = 0.8F;
    if (below(4) == 0) r.sampling.presence = 0.5F;
    r.sampling.ignore_eos = below(2) == 0;
    r.priority = static_cast<int32_t>(below(3)) - 1;
    pool.requests.push_back(std::move(r));
  }
  s.restart(0);
  for (const wire::Submit& r : pool.requests) {
    pool.alone.push_back(s.alone(r));
    REQUIRE_FALSE(s.finish[r.id].empty());
    REQUIRE(s.finish[r.id] != "error");
  }
  return pool;
}

/// Some of the pool, at random moments, in caches of random size; some leave, some come from a rank that died.
class TinySchedule {
 public:
  TinySchedule(Server& server, const Pool& pool, uint64_t seed) : s_(server), pool_(pool), random_(seed) {
    s_.restart_with([&](SchedulerLimits& l) {
      l.max_seqs = 1 + below(6);
      l.prefill_chunk = 64 * (1 + below(2));
      l.max_window = 1 + below(8);
      l.layers = below(4) == 0 ? 1 : l.layers;
      l.blocks = 9 + below(25);
      l.snaps = below(3) == 0 ? 0 : 1 + below(6);
      l.snap_interval = 64 * below(3);
      l.reserve_output = 1 + below(10);
      l.lookup_drafts = below(2) == 0 ? 0 : below(l.max_window);
      l.always_draft = below(2) == 0;
      l.reuse_output = below(2) == 0 ? ReuseOutput::never : ReuseOutput::idle;
    });
    s_.output.clear();
  }

  void run() {
    std::vector<size_t> order(pool_.requests.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    order.resize(6 + static_cast<size_t>(below(5)));
    for (const size_t i : order) {
      submit(i);
      for (int turns = below(8); turns > 0; --turns) s_.turn();
      if (below(6) == 0) gone_.insert(pool_.requests[i].id), s_.scheduler->cancel(pool_.requests[i].id);
    }
    for (int turns = 0; s_.turn(); ++turns) REQUIRE(turns < 4000);
    for (const size_t i : order) {
      const uint64_t id = pool_.requests[i].id;
      CAPTURE(id);
      if (!gone_.contains(id)) CHECK(s_.output[id] == pool_.alone[i]);
    }
    s_.scheduler->check();
  }

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }
  void submit(size_t i) {
    wire::Submit r = pool_.requests[i];
    const Tokens& all = pool_.alone[i];
    if (below(4) == 0 && all.size() > 1) {
      r.emitted.assign(all.begin(), all.begin() + 1 + below(static_cast<int32_t>(all.size()) - 1));
      s_.output[r.id] = r.emitted;
    }
    s_.scheduler->submit(std::move(r));
  }

  Server& s_;
  const Pool& pool_;
  std::mt19937_64 random_;
  std::set<uint64_t> gone_;
};

}  // namespace

TEST_CASE("random schedules on glm53-tiny: every request gets the tokens that it gets alone") {
  Server& s = server();
  std::mt19937_64 random(7);
  const Pool pool = make_pool(s, random);
  uint64_t preemptions = 0, hits = 0;
  s.parts = 0;
  for (uint64_t seed = 1; seed <= kSchedules; ++seed) {
    INFO("schedule " << seed);
    TinySchedule(s, pool, seed).run();
    preemptions += s.scheduler->stats().preemptions;
    hits += s.scheduler->stats().prefix_hits;
  }
  MESSAGE(cat(preemptions, " put back, ", hits, " tokens found, ", s.parts, " steps with a part of a piece"));
  CHECK(preemptions > 2);
  CHECK(hits > 300);
  CHECK(s.parts > 100);
  s.restart(0);
}
