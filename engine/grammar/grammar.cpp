#include "engine/grammar/grammar.h"

#include <algorithm>
#include <optional>

#include "common/error.h"
#include "common/strings.h"
#include "engine/grammar/prune.h"

namespace glm53::grammar {

using State = Grammar::State;
using Edge = Grammar::Edge;

void Budget::spend(uint64_t work) {
  used_ += work;
  if (used_ > limits_.work) {
    throw Error(Code::usage, cat("the grammar is too large or too deeply nested (more than ", limits_.work, " steps)"));
  }
}

Builder::Builder(Budget& budget) : budget_(&budget) {
  nodes_.resize(2);
  nodes_[1].kind = Kind::nothing;
}

Builder::Id Builder::add(Node node) {
  budget_->spend(1);
  nodes_.push_back(std::move(node));
  return static_cast<Id>(nodes_.size() - 1);
}

Builder::Id Builder::set(const ByteSet& bytes) {
  if (bytes.none()) return nothing();
  Node node;
  node.kind = Kind::set;
  node.bytes = bytes;
  return add(std::move(node));
}

Builder::Id Builder::range(uint8_t low, uint8_t high) {
  ByteSet bytes;
  for (uint32_t b = low; b <= high; ++b) bytes.set(b);
  return set(bytes);
}

Builder::Id Builder::symbol(int32_t token) {
  auto at = std::find(symbols_.begin(), symbols_.end(), token);
  if (at == symbols_.end()) {
    if (symbols_.size() >= kMaxSymbols) throw Error(Code::internal, "a grammar with too many symbols");
    at = symbols_.insert(symbols_.end(), token);
  }
  Node node;
  node.kind = Kind::symbol;
  node.a = kBytes + static_cast<uint32_t>(at - symbols_.begin());
  return add(std::move(node));
}

Builder::Id Builder::text(std::string_view text) {
  if (text.empty()) return empty();
  Node node;
  node.kind = Kind::text;
  node.texts.emplace_back(text);
  return add(std::move(node));
}

Builder::Id Builder::literals(std::vector<std::string> texts) {
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  budget_->spend(texts.size());
  Node node;
  node.kind = Kind::literals;
  node.texts = std::move(texts);
  return add(std::move(node));
}

Builder::Id Builder::seq(std::vector<Id> parts) {
  if (parts.size() == 1) return parts[0];
  Node node;
  node.kind = Kind::seq;
  node.parts = std::move(parts);
  return add(std::move(node));
}

Builder::Id Builder::alt(std::vector<Id> parts) {
  if (parts.size() == 1) return parts[0];
  if (parts.empty()) return nothing();
  Node node;
  node.kind = Kind::alt;
  node.parts = std::move(parts);
  return add(std::move(node));
}

Builder::Id Builder::repeat(Id part, int64_t min, int64_t max) {
  const auto limit = static_cast<int64_t>(budget_->limits().repeat);
  if (min > limit || max > limit) {
    throw Error(Code::usage, cat("a repetition of ", std::max(min, max), ", at most ", limit, " can be enforced"));
  }
  if (max != kUnbounded && min > max) return nothing();
  Node node;
  node.kind = Kind::repeat;
  node.parts = {part};
  node.min = min;
  node.max = max;
  return add(std::move(node));
}

Builder::Id Builder::call(uint32_t rule) {
  Node node;
  node.kind = Kind::call;
  node.a = rule;
  return add(std::move(node));
}

uint32_t Builder::rule(std::string name) {
  if (rules_.size() >= budget_->limits().rules) {
    throw Error(Code::usage, cat("the grammar has more than ", budget_->limits().rules, " rules"));
  }
  budget_->spend(1);
  rules_.push_back({std::move(name), nothing(), false});
  return static_cast<uint32_t>(rules_.size() - 1);
}

void Builder::define(uint32_t rule, Id body) {
  rules_[rule].body = body;
  rules_[rule].defined = true;
}

uint32_t Builder::add_rule(std::string name, Id body) {
  const uint32_t r = rule(std::move(name));
  define(r, body);
  return r;
}

uint32_t Builder::new_state(std::vector<State>& out) {
  budget_->spend(1);
  if (out.size() >= budget_->limits().states) {
    throw Error(Code::usage, cat("the grammar is too large: it needs more than ", budget_->limits().states, " states"));
  }
  out.emplace_back();
  return static_cast<uint32_t>(out.size() - 1);
}

namespace {

void add_set(std::vector<State>& out, const ByteSet& bytes, uint32_t from, uint32_t to) {
  for (uint32_t b = 0; b < kBytes; ++b) {
    if (!bytes[b]) continue;
    const uint32_t low = b;
    while (b + 1 < kBytes && bytes[b + 1]) ++b;
    out[from].edges.push_back({static_cast<uint16_t>(low), static_cast<uint16_t>(b), to});
  }
}

}  // namespace

// Nothing that is emitted later ever leads back to `from`: loops make a state of their own.
uint32_t Builder::emit(std::vector<State>& out, Id id, uint32_t from) {
  budget_->spend(1);
  const Node& node = nodes_[id];
  switch (node.kind) {
    case Kind::empty:
      return from;
    case Kind::nothing:
      return new_state(out);
    case Kind::set: {
      const uint32_t to = new_state(out);
      add_set(out, node.bytes, from, to);
      return to;
    }
    case Kind::symbol: {
      const uint32_t to = new_state(out);
      out[from].edges.push_back({static_cast<uint16_t>(node.a), static_cast<uint16_t>(node.a), to});
      return to;
    }
    case Kind::text: {
      uint32_t at = from;
      for (const char c : node.texts[0]) {
        const uint32_t to = new_state(out);
        const auto b = static_cast<uint16_t>(static_cast<unsigned char>(c));
        out[at].edges.push_back({b, b, to});
        at = to;
      }
      return at;
    }
    case Kind::literals: {
      const uint32_t to = new_state(out);
      emit_trie(out, node.texts, 0, node.texts.size(), 0, from, to);
      return to;
    }
    case Kind::seq: {
      uint32_t at = from;
      for (const Id part : node.parts) at = emit(out, part, at);
      return at;
    }
    case Kind::alt: {
      const uint32_t to = new_state(out);
      for (const Id part : node.parts) {
        const uint32_t end = emit(out, part, from);
        out[end].skips.push_back(to);
      }
      return to;
    }
    case Kind::repeat:
      return emit_repeat(out, node, from);
    case Kind::call: {
      const uint32_t to = new_state(out);
      out[from].calls.push_back({node.a, to});
      return to;
    }
    case Kind::dfa:
      break;
  }
  return emit_dfa(out, dfas_[node.a], from);
}

uint32_t Builder::emit_repeat(std::vector<State>& out, const Node& node, uint32_t from) {
  const Id part = node.parts[0];
  const int64_t min = node.min, max = node.max;
  uint32_t at = from;
  for (int64_t i = 0; i < min; ++i) at = emit(out, part, at);
  if (max == kUnbounded) {
    const uint32_t loop = new_state(out);
    out[at].skips.push_back(loop);
    const uint32_t end = emit(out, part, loop);
    out[end].skips.push_back(loop);
    return loop;
  }
  const uint32_t to = new_state(out);
  for (int64_t i = min; i < max; ++i) {
    out[at].skips.push_back(to);
    at = emit(out, part, at);
  }
  out[at].skips.push_back(to);
  return to;
}

void Builder::emit_trie(std::vector<State>& out, const std::vector<std::string>& texts, size_t begin, size_t end,
                        size_t depth, uint32_t from, uint32_t to) {
  // A run that only one text has is a chain, so that long texts do not recurse.
  while (end - begin == 1 && depth < texts[begin].size()) {
    const uint32_t next = new_state(out);
    const auto b = static_cast<uint16_t>(static_cast<unsigned char>(texts[begin][depth++]));
    out[from].edges.push_back({b, b, next});
    from = next;
  }
  if (begin < end && texts[begin].size() == depth) {
    out[from].skips.push_back(to);
    ++begin;
  }
  if (depth > 4096) throw Error(Code::usage, "texts with more than 4096 bytes in common");
  while (begin < end) {
    const char c = texts[begin][depth];
    size_t next = begin;
    while (next < end && texts[next][depth] == c) ++next;
    budget_->spend(next - begin);
    const uint32_t state = new_state(out);
    const auto b = static_cast<uint16_t>(static_cast<unsigned char>(c));
    out[from].edges.push_back({b, b, state});
    emit_trie(out, texts, begin, next, depth + 1, state, to);
    begin = next;
  }
}

uint32_t Builder::emit_dfa(std::vector<State>& out, const Dfa& dfa, uint32_t from) {
  std::vector<uint32_t> number(dfa.states.size());
  for (uint32_t& n : number) n = new_state(out);
  const uint32_t to = new_state(out);
  if (!number.empty()) out[from].skips.push_back(number[0]);
  for (size_t s = 0; s < dfa.states.size(); ++s) {
    budget_->spend(dfa.states[s].size());
    for (const Edge& e : dfa.states[s]) out[number[s]].edges.push_back({e.low, e.high, number[e.target]});
    if (dfa.final[s]) out[number[s]].skips.push_back(to);
  }
  return to;
}

namespace {

using Set = std::vector<uint32_t>;  // sorted states of an automaton

class Subsets {
 public:
  Subsets(std::vector<State> states, uint32_t final, Budget& budget)
      : states_(std::move(states)), final_(final), budget_(budget) {}
  Set close(Set set) const {
    std::vector<uint32_t> todo = set;
    while (!todo.empty()) {
      const uint32_t s = todo.back();
      todo.pop_back();
      for (const uint32_t t : states_[s].skips) {
        budget_.spend(1);
        const auto at = std::lower_bound(set.begin(), set.end(), t);
        if (at != set.end() && *at == t) continue;
        set.insert(at, t);
        todo.push_back(t);
      }
    }
    return set;
  }
  bool final(const Set& set) const { return std::binary_search(set.begin(), set.end(), final_); }
  void boundaries(const Set& set, std::bitset<kBytes + 1>& cuts) const {
    for (const uint32_t s : set) {
      for (const Edge& e : states_[s].edges) {
        cuts.set(e.low);
        cuts.set(e.high + 1u);
      }
    }
  }
  Set step(const Set& set, uint32_t byte) const {
    Set out;
    for (const uint32_t s : set) {
      budget_.spend(1);
      for (const Edge& e : states_[s].edges)
        if (e.low <= byte && byte <= e.high) out.push_back(e.target);
    }
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return close(std::move(out));
  }

 private:
  std::vector<State> states_;
  uint32_t final_;
  Budget& budget_;
};

}  // namespace

Builder::Id Builder::product(Id a, Id b, bool without) {
  const auto subsets = [&](Id id) {
    std::vector<State> states;
    const uint32_t begin = new_state(states);
    const uint32_t end = emit(states, id, begin);
    for (const State& s : states)
      if (!s.calls.empty()) throw Error(Code::internal, "a product of expressions that call rules");
    return Subsets(std::move(states), end, *budget_);
  };
  const Subsets left = subsets(a), right = subsets(b);
  std::map<std::pair<Set, Set>, uint32_t> number;
  std::vector<std::pair<Set, Set>> order;
  Dfa dfa;
  const auto find = [&](Set l, Set r) {
    const auto [at, fresh] = number.try_emplace({std::move(l), std::move(r)}, static_cast<uint32_t>(order.size()));
    if (fresh) {
      budget_->spend(8 + at->first.first.size() + at->first.second.size());
      order.push_back(at->first);
    }
    return at->second;
  };
  find(left.close({0}), right.close({0}));
  for (size_t i = 0; i < order.size(); ++i) {
    const auto [l, r] = order[i];
    std::bitset<kBytes + 1> cuts;
    left.boundaries(l, cuts);
    right.boundaries(r, cuts);
    std::vector<Edge> edges;
    for (uint32_t low = 0; low < kBytes; ++low) {
      if (!cuts[low]) continue;
      uint32_t high = low;
      while (high + 1 < kBytes && !cuts[high + 1]) ++high;
      Set next = left.step(l, low);
      Set other = right.step(r, low);
      if (next.empty() || (!without && other.empty())) continue;
      edges.push_back(
          {static_cast<uint16_t>(low), static_cast<uint16_t>(high), find(std::move(next), std::move(other))});
    }
    dfa.states.push_back(std::move(edges));
    dfa.final.push_back(left.final(l) && right.final(r) != without);
  }
  return automaton(std::move(dfa.states), std::move(dfa.final));
}

Builder::Id Builder::automaton(std::vector<std::vector<Edge>> states, std::vector<bool> final) {
  dfas_.push_back({std::move(states), std::move(final)});
  Node node;
  node.kind = Kind::dfa;
  node.a = static_cast<uint32_t>(dfas_.size() - 1);
  return add(std::move(node));
}

Grammar Builder::finish(uint32_t start) {
  Grammar out;
  out.start = start;
  out.symbols = symbols_;
  std::vector<std::string> names;
  for (const Rule& rule : rules_) {
    if (!rule.defined) throw Error(Code::usage, cat("rule \"", rule.name, "\" is not defined"));
    const uint32_t begin = new_state(out.states);
    out.rules.push_back(begin);
    const uint32_t end = emit(out.states, rule.body, begin);
    out.states[end].final = true;
    names.push_back(rule.name);
  }
  prune(out, names, *budget_);
  return out;
}

}  // namespace glm53::grammar
