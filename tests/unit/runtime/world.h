// Requests, what they give alone, and a scheduler and executor that turn together.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include <doctest/doctest.h>

#include "engine/runtime/scheduler.h"
#include "hash_executor.h"

namespace glm53::test {

/// What the request gives when it runs alone.
struct Expected {
  Tokens output;
  std::string finish;
};
inline Expected oracle(const wire::Submit& r) {
  Expected e;
  const auto stops = [&](int32_t t) {
    return (!r.sampling.ignore_eos && t == 0) ||
           std::count(r.sampling.stop_ids.begin(), r.sampling.stop_ids.end(), t) > 0;
  };
  uint64_t state = kNoTokens;
  for (const int32_t t : r.prompt) state = state_after(state, t);
  while (e.finish.empty()) {
    e.output.push_back(token_of(state));
    state = state_after(state, e.output.back());
    if (stops(e.output.back()))
      e.finish = "stop";
    else if (static_cast<int32_t>(e.output.size()) == r.sampling.max_tokens)
      e.finish = "length";
  }
  return e;
}

/// Scheduler and executor turning together; collects what the client of each request sees.
struct World {
  explicit World(const SchedulerLimits& limits) : table(kSpace), scheduler(limits, table, 1), executor(limits) {
    scheduler.set_gate(true);
  }

  struct Seen {
    Tokens output;
    std::string finish;
    int32_t code = 0, stop_token = -1;
    uint32_t cached = 0, retry_after = 0;
  };

  void collect() {
    for (const wire::Delta& d : scheduler.take_deltas()) {
      Seen& s = seen[d.id];
      REQUIRE(s.finish.empty());
      REQUIRE(d.index == s.output.size());
      s.output.insert(s.output.end(), d.tokens.begin(), d.tokens.end());
      s.finish = d.finish;
      s.code = d.error_code;
      s.retry_after = d.retry_after_s;
      s.cached = std::max(s.cached, d.cached_tokens);
      s.stop_token = d.stop_token;
    }
  }
  void submit(const wire::Submit& r) {
    seen[r.id] = {};
    seen[r.id].output = r.emitted;
    scheduler.submit(r);
    collect();
  }
  /// False when there was nothing to run. `between` runs while the step is in flight.
  bool turn(const std::function<void()>& between = {}) {
    const auto plan = scheduler.plan(now);
    collect();
    if (!plan) return false;
    executor.submit(*plan);
    if (between) between();
    scheduler.complete(executor.poll().value());
    collect();
    scheduler.check();
    return true;
  }
  void run_dry(int limit = 100000) {
    while (turn()) REQUIRE(--limit > 0);
    REQUIRE(scheduler.idle());
    scheduler.check();
    CHECK(scheduler.stats().blocks_used == 0);
    CHECK(scheduler.stats().slots_used == 0);
    CHECK(table.size() == 0);
  }

  SamplingTable table;
  Scheduler scheduler;
  HashExecutor executor;
  std::map<uint64_t, Seen> seen;
  Scheduler::Time now{0};
};

inline SchedulerLimits limits_of(int seqs, int tokens_of_cache) {
  SchedulerLimits l;
  l.max_context = 600;
  l.max_seqs = seqs;
  l.max_rows = seqs + 128;
  l.prefill_chunk = 128;
  l.max_window = 4;
  l.blocks = 1 + tokens_of_cache / kBlockTokens;
  return l;
}

inline wire::Submit make_request(uint64_t id, size_t prompt, int32_t max_tokens) {
  wire::Submit r;
  r.id = id;
  for (size_t i = 0; i < prompt; ++i) r.prompt.push_back(static_cast<int32_t>((id * 31 + i * 7) % kVocab));
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  return r;
}

inline SchedulerLimits caching(int seqs, int tokens_of_cache, int snaps) {
  SchedulerLimits l = limits_of(seqs, tokens_of_cache);
  l.snaps = snaps;
  l.snap_interval = 128;
  return l;
}

/// A turn of a conversation: what was said before, and more.
inline wire::Submit next_turn(const wire::Submit& before, uint64_t id, const Tokens& answer, size_t more) {
  wire::Submit r = make_request(id, more, before.sampling.max_tokens);
  r.prompt.insert(r.prompt.begin(), answer.begin(), answer.end());
  r.prompt.insert(r.prompt.begin(), before.prompt.begin(), before.prompt.end());
  r.salt = before.salt;
  return r;
}

}  // namespace glm53::test
