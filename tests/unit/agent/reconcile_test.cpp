// The reconciler as tables: a situation, and the actions it asks for; then a simulated world in which things die.
#include "agent/reconcile/reconcile.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/agent/world.h"

using namespace glm53;
using namespace glm53::reconcile;
using namespace std::chrono_literals;

TEST_CASE("starting, step by step") {
  using S = ClusterState;
  check({
      {"nothing wanted, nothing there", World().stopped().no_api(), "", S::down},
      {"API process first", World().no_api(), "head:start_api", S::preparing},
      {"it starts", World().no_api().api(false), "", S::preparing},
      {"highest rank first", World(), "worker:start_rank1", S::preparing},
      {"record made, agent ended before the rank was started", World().generation(), "worker:start_rank1",
       S::preparing},
      {"rank 1 starts", World().generation().rank(1, Phase::init), "", S::preparing},
      {"rank 1 at the rendezvous", World().generation().rank(1, Phase::rendezvous), "head:start_rank0", S::preparing},
      {"both start", World().generation().rank(1, Phase::rendezvous).rank(0, Phase::init), "", S::preparing},
      {"loading", World().generation().rank(1, Phase::load_target).rank(0, Phase::load_target), "", S::loading},
      {"one ready", World().generation().rank(1, Phase::ready).rank(0, Phase::capture), "", S::loading},
      {"both ready: canary", World().both_ready(), "head:warm_up", S::warming},
      {"canary under way", World().both_ready().with([](World& x) { x.o.canary = Canary::running; }), "", S::warming},
      {"canary passed: gate", World().both_ready().with([](World& x) { x.o.canary = Canary::passed; }),
       "head:open_gate", S::warming},
      {"up", World().up(), "", S::up},
  });
}

TEST_CASE("a start begins with the checks, and nothing is started before they passed") {
  using S = ClusterState;
  const auto fresh = [](Preflight state) {
    return World().no_api().with([&](World& x) {
      x.o.preflight = state;
      if (state == Preflight::failed) x.o.preflight_error = "E214 head: port 8888 is in use";
    });
  };
  const auto checked = [](World x, Preflight state) { return x.with([&](World& y) { y.o.preflight = state; }); };
  check({
      {"checks first", fresh(Preflight::none), "head:preflight", S::preparing},
      {"they are at work", fresh(Preflight::running), "", S::preparing},
      {"they failed", fresh(Preflight::failed), "", S::failed},
      {"they passed", fresh(Preflight::passed), "head:start_api", S::preparing},
      {"nothing is wanted", fresh(Preflight::none).stopped(), "", S::down},
      {"an API process of before stays meanwhile", checked(World(), Preflight::none), "head:preflight", S::preparing},
      {"and when they failed", checked(World(), Preflight::failed), "", S::failed},
      {"a generation at work is not checked", checked(World().up(), Preflight::none), "", S::up},
      {"leftovers go first", checked(World().rank(1, Phase::ready, 7), Preflight::none), "worker:stop_rank1",
       S::preparing},
      {"leftovers are stopping",
       checked(World().rank(1, Phase::ready, 7).with([](World& x) { x.at(1).stop_requested = true; }), Preflight::none),
       "", S::preparing},
      {"a worker that does not answer is waited for",
       checked(World().with([](World& x) { x.o.nodes[1].reachable = false; }), Preflight::none), "", S::preparing},
  });
  CHECK(cluster_view(fresh(Preflight::failed).w, fresh(Preflight::failed).o, kNow).reason ==
        "E214 head: port 8888 is in use");
}

TEST_CASE("a generation's number is above every number seen") {
  World x;
  x.o.last_generation = 4;
  x.w.min_generation = 3;
  CHECK(next_actions(x.w, x.o, kNow).at(0).generation == 5);
  x.w.min_generation = 9;
  CHECK(next_actions(x.w, x.o, kNow).at(0).generation == 9);
  // A lost database: the worker still remembers an ended rank of generation 20.
  x.rank(1, Phase::ready, 20).dead(1, 0);
  const auto actions = next_actions(x.w, x.o, kNow);
  CHECK(said(actions) == "worker:start_rank1");
  CHECK(actions.at(0).generation == 21);
}

TEST_CASE("one rank, and several on one node") {
  World one;
  one.w.ranks = {"head"};
  one.o.nodes.pop_back();
  CHECK(said(next_actions(one.w, one.o, kNow)) == "head:start_rank0");
  one.generation().rank(0, Phase::ready);
  CHECK(said(next_actions(one.w, one.o, kNow)) == "head:warm_up");

  World two;
  two.w.ranks = {"head", "head"};
  two.o.nodes.pop_back();
  CHECK(said(next_actions(two.w, two.o, kNow)) == "head:start_rank1");
  two.generation();
  two.o.nodes[0].processes.push_back(World::process(1, 1, false, Phase::rendezvous));
  CHECK(said(next_actions(two.w, two.o, kNow)) == "head:start_rank0");
}

TEST_CASE("a rank dies, in every phase") {
  for (const Phase phase :
       {Phase::exec, Phase::init, Phase::rendezvous, Phase::comm_init, Phase::load_target, Phase::load_draft,
        Phase::measure, Phase::pools, Phase::capture, Phase::warmup, Phase::ready}) {
    CAPTURE(name(phase));
    for (const int victim : {0, 1}) {
      CAPTURE(victim);
      World x;
      x.generation().rank(0, phase).rank(1, phase).dead(victim, {}, 9);
      const int other = 1 - victim;
      const auto actions = next_actions(x.w, x.o, kNow);
      CHECK(said(actions) == (other == 0 ? "head:stop_rank0" : "worker:stop_rank1"));
      const auto stop =
          std::find_if(actions.begin(), actions.end(), [](const auto& a) { return a.kind == ActionKind::stop_rank; });
      REQUIRE(stop != actions.end());
      CHECK(stop->cause == Cause::killed);
      // It was asked: wait.
      x.asked(other);
      CHECK(said(next_actions(x.w, x.o, kNow)).empty());
      // All gone: the record is closed with the first reason.
      x.dead(other, 68);
      const auto closing = next_actions(x.w, x.o, kNow);
      CHECK(said(closing) == "head:clean worker:clean");
      CHECK(closing.at(0).cause == Cause::killed);
      CHECK(closing.at(0).argument.find("killed by signal 9") != std::string::npos);
    }
  }
}

TEST_CASE("only rank 1 was started when it died") {
  World x;
  x.generation().rank(1, Phase::init).dead(1, 67);
  const auto actions = next_actions(x.w, x.o, kNow);
  CHECK(said(actions) == "head:clean worker:clean");
  CHECK(actions.at(0).exit_code == 67);
}

TEST_CASE("the echo is replaced by the reason when the worker reports it") {
  World x;
  x.up().dead(0, 68);
  CHECK(said(next_actions(x.w, x.o, kNow)) == "worker:stop_rank1");
  x.o.generation->ending = Cause::exited;  // recorded with that stop
  x.o.generation->ending_code = 68;
  x.dead(1, {}, 9);
  const auto actions = next_actions(x.w, x.o, kNow);
  REQUIRE(said(actions) == "head:clean worker:clean");
  CHECK(actions.at(0).cause == Cause::killed);
}

TEST_CASE("restart after a failure") {
  using S = ClusterState;
  const auto after = [](std::vector<PastEnd> ends) {
    World x;
    x.o.ends = std::move(ends);
    x.o.last_generation = x.o.ends.size();
    return x;
  };
  const PastEnd kill{1, kNow - 10s, Cause::killed, 0, 0ms, "rank1 killed by signal 9"};
  const PastEnd older{1, kNow - 60s, Cause::killed, 0, 0ms, "rank1 killed by signal 9"};
  const PastEnd config{1, kNow - 10s, Cause::exited, 64, 0ms, "rank0 exited with 64"};
  check({
      {"at once", after({kill}), "worker:start_rank1", S::preparing},
      {"30 s after the second", after({older, kill}), "head:backoff", S::preparing},
      {"crash loop", after({older, older, older, kill}), "", S::failed},
      {"config is not retried", after({config}), "", S::failed},
      {"somebody acted", after({config}).with([](World& x) { x.w.changed_at = kNow - 1s; }), "worker:start_rank1",
       S::preparing},
  });
  const auto actions = next_actions(after({older, kill}).w, after({older, kill}).o, kNow);
  CHECK(actions.at(0).until == kNow + 20s);
  World later = after({older, kill});
  const auto restarted = next_actions(later.w, later.o, kNow + 20s);
  // The API process is silent for too long by then only if nobody touched it; it was heard 1 s before kNow.
  CHECK(said(restarted) == "worker:start_rank1");
  CHECK(restarted.at(0).automatic);
}

TEST_CASE("stopping") {
  using S = ClusterState;
  const auto stop = [](World x) { return x.stopped(); };
  const auto ending = [](World x) {
    x.stopped();
    x.o.generation->ending = Cause::requested;
    x.o.generation->ending_reason = "stopped by request";
    return x;
  };
  check({
      {"up: drain first", stop(World().up()), "head:drain", S::draining},
      {"requests run", ending(World().up()).with([](World& x) {
         x.o.drain_since = kNow - 1s;
         x.o.requests_running = 2;
       }),
       "", S::draining},
      {"drained: both at once", ending(World().up()).with([](World& x) { x.o.drain_since = kNow - 1s; }),
       "head:stop_rank0 worker:stop_rank1", S::draining},
      {"drained long enough", ending(World().up()).with([](World& x) {
         x.o.drain_since = kNow - 31s;
         x.o.requests_running = 2;
       }),
       "head:stop_rank0 worker:stop_rank1", S::draining},
      {"now", stop(World().up()).with([](World& x) { x.w.drain = 0ms; }), "head:stop_rank0 worker:stop_rank1",
       S::draining},
      {"while starting: no drain", stop(World().generation().rank(1, Phase::init)), "worker:stop_rank1", S::draining},
      {"while loading", stop(World().generation().rank(1, Phase::load_target).rank(0, Phase::load_target)),
       "head:stop_rank0 worker:stop_rank1", S::draining},
      {"asked", ending(World().both_ready().asked(0).asked(1)), "", S::draining},
      {"one gone", ending(World().both_ready().asked(0).asked(1).dead(0, 0)), "", S::draining},
      {"both gone", ending(World().both_ready().asked(0).asked(1).dead(0, 0).dead(1, 0)), "head:clean worker:clean",
       S::draining},
      {"then the API process", stop(World()), "head:stop_api", S::draining},
      {"asked as well", stop(World()).with([](World& x) { x.at(-1).stop_requested = true; }), "", S::draining},
      {"down", stop(World()).with([](World& x) { x.dead(-1, 0); }), "", S::down},
      {"nothing started yet", stop(World().generation()), "head:clean worker:clean", S::draining},
  });
}

TEST_CASE("a stop closes its generation as requested, whatever the ranks' ends say") {
  World x;
  x.both_ready().stopped().asked(0).asked(1).dead(0, 0).dead(1, {}, 9);
  x.o.generation->ending = Cause::requested;
  CHECK(next_actions(x.w, x.o, kNow).at(0).cause == Cause::requested);
}

TEST_CASE("restart on request") {
  World x;
  x.up();
  x.w.min_generation = 2;
  CHECK(said(next_actions(x.w, x.o, kNow)) == "head:drain");
  x.w.drain = 0ms;
  CHECK(said(next_actions(x.w, x.o, kNow)) == "head:stop_rank0 worker:stop_rank1");
  x.asked(0).asked(1).dead(0, 0).dead(1, 0);
  x.o.generation->ending = Cause::requested;
  CHECK(said(next_actions(x.w, x.o, kNow)) == "head:clean worker:clean");
  x.o.ends.push_back({1, kNow, Cause::requested, 0, 1h, ""});
  x.o.generation.reset();
  // The API process stays if its configuration does.
  auto actions = next_actions(x.w, x.o, kNow);
  CHECK(said(actions) == "worker:start_rank1");
  CHECK(actions.at(0).generation == 2);
  CHECK_FALSE(actions.at(0).automatic);
  x.w.config_hash = "other";
  CHECK(said(next_actions(x.w, x.o, kNow)) == "head:stop_api");
}

TEST_CASE("the API process") {
  using S = ClusterState;
  const auto died = [](std::optional<int> code, int signal) {
    World x;
    x.up();
    x.dead(-1, code, signal);
    x.o.gate_open = false;
    return x;
  };
  check({
      {"killed while serving: at once, ranks stay", died({}, 9), "head:start_api", S::warming},
      {"exited", died(70, 0), "head:start_api", S::warming},
      {"configuration refused: not again", died(64, 0), "", S::failed},
      {"back again: gate without a canary", died({}, 9).with([](World& x) { x.api(true, 2); }), "head:open_gate",
       S::warming},
      {"deaf", World().up().with([](World& x) { x.at(-1).last_heard = kNow - 31s; }), "head:stop_api", S::up},
      {"dies over and over: wait", died({}, 9).with([](World& x) { x.o.api_starts_last_minute = 5; }), "", S::warming},
      {"dies while a rank dies: ranks first", died({}, 9).with([](World& x) { x.dead(1, {}, 9); }), "head:stop_rank0",
       S::preparing},
      {"dies during a stop", World().up().stopped().with([](World& x) { x.dead(-1, {}, 9); }),
       "head:stop_rank0 worker:stop_rank1", S::draining},
  });
}

TEST_CASE("the worker's agent does not answer") {
  using S = ClusterState;
  const auto lost = [](World x) {
    x.o.nodes[1].reachable = false;
    return x;
  };
  check({
      {"nothing runs: wait", lost(World()), "", S::preparing},
      {"serving goes on", lost(World().up()), "", S::up},
      {"while loading: wait", lost(World().generation().rank(0, Phase::load_target).rank(1, Phase::load_target)), "",
       S::loading},
      {"and rank 0 dies: its generation ends without the worker", lost(World().up().dead(0, 68)), "head:clean",
       S::preparing},
      {"stop: the head's part", lost(World().up().stopped().with([](World& x) { x.w.drain = 0ms; })), "head:stop_rank0",
       S::draining},
  });
  World gone = lost(World().up());
  CHECK(cluster_view(gone.w, gone.o, kNow).reason.find("worker") != std::string::npos);
  // It answers again, and its rank has vanished (the machine was restarted).
  World back;
  back.up();
  back.o.nodes[1].processes.clear();
  CHECK(said(next_actions(back.w, back.o, kNow)) == "head:stop_rank0");
}

TEST_CASE("leftovers are stopped before anything starts") {
  World x;
  x.o.last_generation = 7;
  x.rank(1, Phase::ready, 6);
  CHECK(said(next_actions(x.w, x.o, kNow)) == "worker:stop_rank1");
  CHECK(next_actions(x.w, x.o, kNow).at(0).generation == 6);
  x.asked(1);
  CHECK(said(next_actions(x.w, x.o, kNow)).empty());
  x.dead(1, 0);
  CHECK(said(next_actions(x.w, x.o, kNow)) == "worker:start_rank1");
  // Beside a current generation, too.
  World y;
  y.up();
  y.o.nodes[0].processes.push_back(World::process(0, 0, true, Phase::ready));
  y.o.nodes[0].processes.push_back(World::process(-1, 0, true, Phase::ready));
  CHECK(said(next_actions(y.w, y.o, kNow)) == "head:stop_rank0");
  CHECK(next_actions(y.w, y.o, kNow).at(0).generation == 0);
}

TEST_CASE("adopted processes") {
  // After the agent's own end everything is as it was, but gate and canary are unknown to it.
  World x;
  x.up();
  x.o.gate_open = false;
  CHECK(said(next_actions(x.w, x.o, kNow)) == "head:open_gate");
  World y;  // it had not been up: the canary again
  y.both_ready();
  CHECK(said(next_actions(y.w, y.o, kNow)) == "head:warm_up");
}

TEST_CASE("limits of time") {
  using S = ClusterState;
  check({
      {"start stalls", World().generation().rank(1, Phase::load_target).rank(0, Phase::load_target).with([](World& x) {
         x.at(1).last_heard = kNow - 181s;
       }),
       "head:stop_rank0 worker:stop_rank1", S::preparing},
      {"a long but healthy piece of work",
       World().generation().rank(1, Phase::capture).rank(0, Phase::capture).with([](World& x) {
         x.at(1).last_heard = kNow - 181s;
         x.at(1).extended_until = kNow + 60s;
       }),
       "", S::loading},
      {"watchdog", World().up().with([](World& x) { x.at(0).last_heard = kNow - 31s; }),
       "head:stop_rank0 worker:stop_rank1", S::preparing},
      {"watchdog of an unreachable node says nothing", World().up().with([](World& x) {
         x.at(1).last_heard = kNow - 31s;
         x.o.nodes[1].reachable = false;
       }),
       "", S::up},
      {"never ready", World().generation().rank(1, Phase::load_target).rank(0, Phase::load_target).with([](World& x) {
         x.o.generation->started_at = kNow - 3601s;
       }),
       "head:stop_rank0 worker:stop_rank1", S::preparing},
      {"up for longer than that", World().up().with([](World& x) { x.o.generation->started_at = kNow - 100h; }), "",
       S::up},
      {"canary failed", World().both_ready().with([](World& x) { x.o.canary = Canary::failed; }),
       "head:stop_rank0 worker:stop_rank1", S::preparing},
  });
}

// ---- a simulated world: every start converges, wherever something dies

namespace {

/// Processes that advance one phase a tick and do what they are told.
class Simulation {
 public:
  explicit Simulation(World world) : x_(std::move(world)) { x_.no_api(); }

  World& world() { return x_; }
  Time now() const { return now_; }
  ClusterState state() const { return cluster_view(x_.w, x_.o, now_).state; }

  void tick() {
    now_ += 500ms;
    for (auto& node : x_.o.nodes) {
      for (auto& p : node.processes) advance(p);
    }
    for (const NodeAction& a : next_actions(x_.w, x_.o, now_)) apply(a);
  }
  /// Ticks until `done`, at most `most`; false when it never came.
  bool until(const std::function<bool()>& done, int most = 20000) {
    for (int i = 0; i < most; ++i) {
      if (done()) return true;
      tick();
    }
    return false;
  }
  void kill(int rank) {
    for (auto& node : x_.o.nodes) {
      for (auto& p : node.processes) {
        if (p.rank == rank && !p.end) finish(p, {}, 9);
      }
    }
  }

 private:
  void finish(ObservedProcess& p, std::optional<int> code, int signal) {
    p.end = ProcessEnd{code, signal, now_};
    p.ready = false;
    if (p.rank < 0) x_.o.gate_open = false;
  }
  bool all_present(uint64_t n) const {
    size_t there = 0;
    for (const auto& node : x_.o.nodes) {
      for (const auto& p : node.processes) there += p.rank >= 0 && p.generation == n && !p.end ? 1 : 0;
    }
    return there == x_.w.ranks.size();
  }
  void advance(ObservedProcess& p) {
    if (p.end) return;
    p.last_heard = now_;
    if (p.stop_requested) return finish(p, 0, 0);
    if (p.rank < 0) {
      p.ready = true;
    } else if (p.phase < Phase::ready && (p.phase != Phase::rendezvous || all_present(p.generation))) {
      p.phase = static_cast<Phase>(static_cast<int>(p.phase) + 1);
      p.ready = p.phase == Phase::ready;
    } else if (p.phase > Phase::rendezvous && !all_present(p.generation)) {
      finish(p, 68, 0);
    }
  }
  void add(const NodeAction& a) {
    auto& node = a.node == "head" ? x_.o.nodes[0] : x_.o.nodes[1];
    std::erase_if(node.processes, [&](const auto& p) { return p.rank == a.rank && p.end; });
    ObservedProcess p = World::process(a.rank, a.generation, false, Phase::exec);
    p.last_heard = p.started_at = now_;
    p.config_hash = x_.w.config_hash;
    node.processes.push_back(p);
  }
  void apply(const NodeAction& a) {
    switch (a.kind) {
      case ActionKind::start_api:
        add(a);
        break;
      case ActionKind::start_rank:
        if (!x_.o.generation || x_.o.generation->n != a.generation) {
          x_.generation(a.generation);
          x_.o.generation->started_at = now_;
          x_.o.canary = Canary::none;
          x_.o.drain_since.reset();
          x_.o.gate_open = false;
        }
        add(a);
        break;
      case ActionKind::stop_rank:
      case ActionKind::stop_api:
        if (x_.o.generation && a.cause != Cause::none && x_.o.generation->ending == Cause::none) {
          x_.o.generation->ending = a.cause;
          x_.o.generation->ending_reason = a.argument;
        }
        for (auto& p : (a.node == "head" ? x_.o.nodes[0] : x_.o.nodes[1]).processes) {
          if (p.rank == a.rank && p.generation == a.generation) p.stop_requested = true;
        }
        break;
      case ActionKind::clean:
        if (a.node == "head") {
          const bool was_up = x_.o.generation->was_up;
          x_.o.ends.push_back({a.generation, now_, a.cause, a.exit_code, was_up ? 1min : 0min, a.argument});
          x_.o.generation.reset();
        }
        break;
      case ActionKind::warm_up:
        x_.o.canary = Canary::passed;
        break;
      case ActionKind::open_gate:
        x_.o.gate_open = true;
        x_.o.generation->was_up = true;
        break;
      case ActionKind::drain:
        x_.o.drain_since = now_;
        break;
      case ActionKind::preflight:
      case ActionKind::download:
      case ActionKind::end_download:
      case ActionKind::copy:
      case ActionKind::none:
      case ActionKind::wait_ready:
      case ActionKind::backoff:
        break;
    }
  }

  World x_;
  Time now_ = kNow;
};

}  // namespace

TEST_CASE("a start converges, and a stop leaves nothing") {
  Simulation s{World()};
  REQUIRE(s.until([&] { return s.state() == ClusterState::up; }));
  s.world().w.running = false;
  REQUIRE(s.until([&] { return s.state() == ClusterState::down; }));
  for (const auto& node : s.world().o.nodes) {
    for (const auto& p : node.processes) CHECK(p.end.has_value());
  }
}

TEST_CASE("whoever is killed after any number of ticks, it comes up again with one more generation at most") {
  for (const int victim : {-1, 0, 1}) {
    for (int ticks = 0; ticks < 40; ++ticks) {
      CAPTURE(victim);
      CAPTURE(ticks);
      Simulation s{World()};
      for (int i = 0; i < ticks; ++i) s.tick();
      s.kill(victim);
      REQUIRE(s.until([&] { return s.state() == ClusterState::up; }));
      CHECK(s.world().o.last_generation <= 2);
      if (victim < 0) CHECK(s.world().o.last_generation == 1);
    }
  }
}

TEST_CASE("a rank that always dies ends in failed after three restarts, and starts again when somebody acts") {
  Simulation s{World()};
  const auto dying = [&] {
    if (s.state() == ClusterState::loading) s.kill(1);
    return s.state() == ClusterState::failed;
  };
  REQUIRE(s.until(dying));
  CHECK(s.world().o.ends.size() == 4);
  const Time failed_at = s.now();
  for (int i = 0; i < 100; ++i) s.tick();
  CHECK(s.world().o.ends.size() == 4);
  CHECK(s.state() == ClusterState::failed);
  // 0 s, 30 s and 2 min between them.
  CHECK(failed_at - kNow >= 150s);
  s.world().w.changed_at = s.now() + 1ms;
  REQUIRE(s.until([&] { return s.state() == ClusterState::up; }));
}

TEST_CASE("stop at any tick of a start") {
  for (int ticks = 0; ticks < 40; ++ticks) {
    CAPTURE(ticks);
    Simulation s{World()};
    for (int i = 0; i < ticks; ++i) s.tick();
    s.world().w.running = false;
    REQUIRE(s.until([&] { return s.state() == ClusterState::down; }, 400));
  }
}
