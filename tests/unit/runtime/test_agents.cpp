// How much of what agents send again is found again: conversations that take turns, counted in tokens.
#include <numeric>

#include <doctest/doctest.h>

#include "world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

struct Agents {
  int sessions = 8, turns = 20, seqs = 8, snaps = 18;
  int32_t head = 1000, user = 60, answer = 32;
  int32_t step_ms = 20;
};

struct Reuse {
  size_t reusable = 0, reused = 0;
  double ratio() const { return static_cast<double>(reused) / static_cast<double>(reusable); }
};

/// One turn of an agent: history, what the user says, and three tokens that ask for the answer.
constexpr int32_t kAsk = 3;

/// Conversations with one system prompt; each sends its next turn as soon as it has its answer, all at the same time.
class Office {
 public:
  explicit Office(const Agents& a) : a_(a), world_(limits()), session_(static_cast<size_t>(a.sessions)) {}

  Reuse run() {
    for (size_t s = 0; s < session_.size(); ++s) {
      session_[s].history = make_request(1, static_cast<size_t>(a_.head), 1).prompt;
      say(s);
    }
    for (int turns = 0; world_.turn(); ++turns) {
      REQUIRE(turns < 100000);
      world_.now += Scheduler::Time(a_.step_ms);
      for (size_t s = 0; s < session_.size(); ++s) {
        const World::Seen& seen = world_.seen.at(session_[s].request.id);
        if (seen.finish.empty()) continue;
        count(s, seen);
        if (session_[s].turn == a_.turns) continue;
        session_[s].history = session_[s].request.prompt;
        session_[s].history.insert(session_[s].history.end(), seen.output.begin(), seen.output.end());
        say(s);
      }
    }
    CHECK(answered_ == a_.sessions * a_.turns);
    return reuse_;
  }

 private:
  struct Session {
    wire::Submit request;
    Tokens history;
    int turn = 0;
    bool counted = true;
    bool answered_before = false;  // somebody had an answer when it was sent
  };

  SchedulerLimits limits() const {
    SchedulerLimits l = caching(a_.seqs, a_.seqs * 8192, a_.snaps);
    l.max_context = 8192;
    l.prefill_chunk = 256;
    l.max_rows = 512;
    l.snap_interval = 8192;
    return l;
  }

  void say(size_t s) {
    Session& session = session_[s];
    const uint64_t id = ++last_;
    wire::Submit r = make_request(id * 100, static_cast<size_t>(a_.user), a_.answer);
    r.id = id;
    r.prompt.insert(r.prompt.begin(), session.history.begin(), session.history.end());
    r.boundaries = {a_.head, static_cast<int32_t>(r.prompt.size())};
    for (int i = 0; i < kAsk; ++i) r.prompt.push_back(i + 1);
    ++session.turn;
    session.counted = false;
    session.answered_before = answered_ > 0;
    reusable_[s] = session.turn > 1          ? session.request.prompt.size()
                   : session.answered_before ? static_cast<size_t>(a_.head)
                                             : 0;
    session.request = r;
    world_.submit(r);
  }

  void count(size_t s, const World::Seen& seen) {
    Session& session = session_[s];
    if (session.counted) return;
    session.counted = true;
    ++answered_;
    REQUIRE(seen.finish == "length");
    CHECK(seen.output == oracle(session.request).output);
    reuse_.reusable += reusable_[s];
    reuse_.reused += std::min(reusable_[s], size_t{seen.cached});
  }

  const Agents a_;
  World world_;
  std::vector<Session> session_;
  std::map<size_t, size_t> reusable_;
  Reuse reuse_;
  uint64_t last_ = 0;
  int answered_ = 0;
};

}  // namespace

TEST_CASE("8 agents with one system prompt find 95% of what they sent before, with few snapshots and with many") {
  for (const int snaps : {10, 12, 18, 64}) {
    for (const int32_t user : {20, 60, 200}) {
      CAPTURE(snaps);
      CAPTURE(user);
      Agents agents;
      agents.snaps = snaps;
      agents.user = user;
      const Reuse reuse = Office(agents).run();
      CHECK(reuse.ratio() >= 0.95);
    }
  }
}

TEST_CASE("more agents than sequences take turns without forgetting each other") {
  Agents agents;
  agents.sessions = 12;
  agents.seqs = 4;
  agents.snaps = 16;
  const Reuse reuse = Office(agents).run();
  CHECK(reuse.ratio() >= 0.95);
}

TEST_CASE("the second turn of a 1,500-token conversation computes at most 64 tokens besides what is new") {
  for (int32_t said = 1480; said <= 1544; said += 8) {
    CAPTURE(said);
    SchedulerLimits limits = caching(2, 8192, 8);
    limits.max_context = 4096;
    World w(limits);
    wire::Submit first = make_request(1, static_cast<size_t>(said), 40);
    first.boundaries = {said};
    for (int i = 0; i < kAsk; ++i) first.prompt.push_back(i + 1);
    w.submit(first);
    w.run_dry();
    const wire::Submit second = next_turn(first, 2, w.seen[1].output, 50);
    const size_t fresh = second.prompt.size() - static_cast<size_t>(said), before = w.executor.prompt_rows_run;
    w.submit(second);
    w.run_dry();
    CHECK(w.seen[2].output == oracle(second).output);
    CHECK(w.executor.prompt_rows_run - before <= fresh + 64);
    CHECK(w.executor.prompt_rows_run - before >= fresh);
  }
}
