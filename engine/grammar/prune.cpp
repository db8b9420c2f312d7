#include "engine/grammar/prune.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::grammar {
namespace {

using State = Grammar::State;

/// A state that only skips is its target, so that alternatives which end alike return to the same place.
void shorten(Grammar& g, Budget& budget) {
  std::vector<uint32_t> alias(g.states.size());
  for (uint32_t s = 0; s < g.states.size(); ++s) {
    uint32_t at = s;
    for (size_t steps = 0; steps < 64; ++steps) {
      const State& state = g.states[at];
      if (state.final || !state.edges.empty() || !state.calls.empty() || state.skips.size() != 1) break;
      at = state.skips[0];
    }
    alias[s] = at;
  }
  for (State& state : g.states) {
    budget.spend(1);
    for (auto& e : state.edges) e.target = alias[e.target];
    for (auto& c : state.calls) c.target = alias[c.target];
    for (uint32_t& t : state.skips) t = alias[t];
    std::sort(state.skips.begin(), state.skips.end());
    state.skips.erase(std::unique(state.skips.begin(), state.skips.end()), state.skips.end());
    const auto order = [](const auto& a, const auto& b) {
      return a.rule != b.rule ? a.rule < b.rule : a.target < b.target;
    };
    const auto same = [](const auto& a, const auto& b) { return a.rule == b.rule && a.target == b.target; };
    std::sort(state.calls.begin(), state.calls.end(), order);
    state.calls.erase(std::unique(state.calls.begin(), state.calls.end(), same), state.calls.end());
  }
  for (uint32_t& r : g.rules) r = alias[r];
}

/// States from which an end of their rule can be reached; with `silent`, without reading anything.
std::vector<bool> reach_end(const Grammar& g, bool silent, Budget& budget) {
  struct Site {
    uint32_t state, rule, target;
  };
  std::vector<std::vector<uint32_t>> before(g.states.size());
  std::vector<std::vector<Site>> returns(g.states.size()), calls(g.rules.size());
  std::vector<std::vector<uint32_t>> starts(g.states.size());
  std::vector<bool> good(g.states.size());
  std::vector<uint32_t> todo;
  const auto mark = [&](uint32_t s) {
    if (good[s]) return;
    good[s] = true;
    todo.push_back(s);
  };
  for (uint32_t r = 0; r < g.rules.size(); ++r) starts[g.rules[r]].push_back(r);
  for (uint32_t s = 0; s < g.states.size(); ++s) {
    const State& state = g.states[s];
    budget.spend(1);
    if (!silent)
      for (const auto& e : state.edges) before[e.target].push_back(s);
    for (const uint32_t t : state.skips) before[t].push_back(s);
    for (const auto& c : state.calls) {
      returns[c.target].push_back({s, c.rule, c.target});
      calls[c.rule].push_back({s, c.rule, c.target});
    }
    if (state.final) mark(s);
  }
  while (!todo.empty()) {
    const uint32_t s = todo.back();
    todo.pop_back();
    for (const uint32_t p : before[s]) mark(p);
    for (const Site& site : returns[s])
      if (good[g.rules[site.rule]]) mark(site.state);
    for (const uint32_t rule : starts[s])
      for (const Site& site : calls[rule])
        if (good[site.target]) mark(site.state);
  }
  return good;
}

void remove_dead(Grammar& g, const std::vector<bool>& good) {
  for (State& state : g.states) {
    std::erase_if(state.edges, [&](const auto& e) { return !good[e.target]; });
    std::erase_if(state.calls, [&](const auto& c) { return !good[c.target] || !good[g.rules[c.rule]]; });
    std::erase_if(state.skips, [&](uint32_t t) { return !good[t]; });
  }
}

/// Rules that `rule` can call before anything is read.
std::vector<uint32_t> left_calls(const Grammar& g, const std::vector<bool>& silent, uint32_t rule, Budget& budget) {
  std::vector<uint32_t> todo{g.rules[rule]}, seen{g.rules[rule]}, out;
  const auto visit = [&](uint32_t s) {
    const auto at = std::lower_bound(seen.begin(), seen.end(), s);
    if (at != seen.end() && *at == s) return;
    seen.insert(at, s);
    todo.push_back(s);
  };
  while (!todo.empty()) {
    const State& state = g.states[todo.back()];
    todo.pop_back();
    budget.spend(1 + state.skips.size() + state.calls.size());
    for (const uint32_t t : state.skips) visit(t);
    for (const auto& c : state.calls) {
      out.push_back(c.rule);
      if (silent[g.rules[c.rule]]) visit(c.target);
    }
  }
  return out;
}

void refuse_left_recursion(const Grammar& g, const std::vector<std::string>& names, Budget& budget) {
  const std::vector<bool> silent = reach_end(g, true, budget);
  std::vector<std::vector<uint32_t>> left(g.rules.size());
  for (uint32_t r = 0; r < g.rules.size(); ++r) left[r] = left_calls(g, silent, r, budget);
  std::vector<uint8_t> color(g.rules.size());
  struct Visit {
    uint32_t rule;
    size_t next;
  };
  for (uint32_t first = 0; first < g.rules.size(); ++first) {
    if (color[first] != 0) continue;
    std::vector<Visit> path{{first, 0}};
    color[first] = 1;
    while (!path.empty()) {
      Visit& v = path.back();
      if (v.next == left[v.rule].size()) {
        color[v.rule] = 2;
        path.pop_back();
        continue;
      }
      const uint32_t to = left[v.rule][v.next++];
      if (color[to] == 1) {
        throw Error(Code::usage, cat("rule \"", names[to], "\" calls itself before it reads anything"),
                    "write lists with repetition (x*) or with the recursion at the end");
      }
      if (color[to] == 0) {
        color[to] = 1;
        path.push_back({to, 0});
      }
    }
  }
}

}  // namespace

void prune(Grammar& grammar, const std::vector<std::string>& names, Budget& budget) {
  shorten(grammar, budget);
  const std::vector<bool> good = reach_end(grammar, false, budget);
  if (!good[grammar.rules[grammar.start]]) throw Error(Code::usage, "no finite text can satisfy it");
  remove_dead(grammar, good);
  refuse_left_recursion(grammar, names, budget);
}

}  // namespace glm53::grammar
