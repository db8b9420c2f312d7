// Situations for the reconciler's tables, built by small steps.
#pragma once

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "agent/reconcile/reconcile.h"

namespace glm53::reconcile {

using namespace std::chrono_literals;

inline const Time kNow{std::chrono::hours(1000)};

/// A situation, built by small steps.
struct World {
  Wanted w;
  Observed o;

  World() {
    w.running = true;
    w.ranks = {"head", "worker"};
    w.config_hash = "h";
    w.changed_at = kNow - 1h;
    o.nodes.resize(2);
    o.nodes[0].name = "head";
    o.nodes[1].name = "worker";
    api();
  }
  World& stopped() {
    w.running = false;
    return *this;
  }
  World& api(bool ready = true, uint64_t n = 1) {
    o.nodes[0].processes.push_back(process(-1, n, ready, Phase::ready));
    return *this;
  }
  World& no_api() {
    std::erase_if(o.nodes[0].processes, [](const auto& p) { return p.rank < 0; });
    return *this;
  }
  World& generation(uint64_t n = 1) {
    o.generation = ObservedGeneration{};
    o.generation->n = n;
    o.generation->started_at = kNow - 10s;
    o.last_generation = n;
    return *this;
  }
  static ObservedProcess process(int rank, uint64_t n, bool ready, Phase phase) {
    ObservedProcess p;
    p.rank = rank;
    p.generation = n;
    p.ready = ready;
    p.phase = phase;
    p.started_at = kNow - 10s;
    p.last_heard = kNow - 1s;
    p.config_hash = "h";
    return p;
  }
  ObservedNode& node_of(int rank) { return o.nodes[rank == 0 ? 0 : 1]; }
  World& rank(int r, Phase phase, uint64_t n = 1) {
    node_of(r).processes.push_back(process(r, n, phase == Phase::ready, phase));
    return *this;
  }
  ObservedProcess& at(int rank) {
    auto& list = rank < 0 ? o.nodes[0].processes : node_of(rank).processes;
    return *std::find_if(list.begin(), list.end(), [&](const auto& p) { return p.rank == rank; });
  }
  World& dead(int rank, std::optional<int> code, int signal = 0) {
    at(rank).end = ProcessEnd{code, signal, kNow - 100ms};
    at(rank).ready = false;
    return *this;
  }
  World& asked(int rank) {
    at(rank).stop_requested = true;
    return *this;
  }
  World& both_ready() { return generation().rank(0, Phase::ready).rank(1, Phase::ready); }
  World& up() {
    both_ready();
    o.generation->was_up = true;
    o.gate_open = true;
    return *this;
  }
  World& with(const std::function<void(World&)>& change) {
    change(*this);
    return *this;
  }
};

/// "head:start_rank0 worker:stop_rank1", waits left out.
inline std::string said(const std::vector<NodeAction>& actions) {
  std::ostringstream out;
  for (const NodeAction& a : actions) {
    if (a.kind == ActionKind::none || a.kind == ActionKind::wait_ready) continue;
    if (out.tellp() > 0) out << ' ';
    out << a.node << ':' << name(a.kind);
    if (a.rank >= 0) out << a.rank;
  }
  return out.str();
}

struct Row {
  const char* what;
  World world;
  std::string actions;
  ClusterState state;
};

inline void check(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    CAPTURE(row.what);
    const auto actions = next_actions(row.world.w, row.world.o, kNow);
    CHECK(said(actions) == row.actions);
    CHECK(name(cluster_view(row.world.w, row.world.o, kNow).state) == name(row.state));
    std::vector<std::string> nodes;
    for (const auto& a : actions) nodes.push_back(a.node);
    std::sort(nodes.begin(), nodes.end());
    CHECK(std::adjacent_find(nodes.begin(), nodes.end()) == nodes.end());
  }
}

}  // namespace glm53::reconcile
