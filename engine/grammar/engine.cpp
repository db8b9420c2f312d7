#include "engine/grammar/engine.h"

#include <algorithm>
#include <unordered_set>

namespace glm53::grammar {
namespace {

constexpr uint32_t kBottom = 0xFFFFFFFF;  // below the frame of the start rule
constexpr uint32_t kOpen = 0xFFFFFFFE;    // below the frame of a partial position
constexpr uint32_t kUnknown = 0xFFFFFFFF;
constexpr uint32_t kMaxDepth = 400;  // frames: texts nested deeper are not allowed
constexpr size_t kMaxStacks = 2048;  // of a set; further ones are left out
constexpr size_t kFullStacks = 400'000, kFullSets = 60'000;
constexpr size_t kMasks = 512, kFrames = 2048, kFew = 1024;

}  // namespace

/// Collects the stacks that read next, from states whose frames may end or call.
class Engine::Closure {
 public:
  explicit Closure(Engine& engine) : engine_(engine) {}
  void add(uint32_t state, uint32_t parent) {
    todo_.emplace_back(state, parent);
    while (!todo_.empty()) {
      const auto [s, p] = todo_.back();
      todo_.pop_back();
      visit(s, p);
    }
  }
  Set take() {
    std::sort(set_.stacks.begin(), set_.stacks.end());
    set_.stacks.erase(std::unique(set_.stacks.begin(), set_.stacks.end()), set_.stacks.end());
    return std::move(set_);
  }

 private:
  void visit(uint32_t state, uint32_t parent) {
    if (visited_.size() > kMaxStacks * 4 || !visited_.insert(uint64_t{state} << 32 | parent).second) return;
    const Reach& reach = engine_.reach(state);
    for (const uint32_t s : reach.reading)
      if (set_.stacks.size() < kMaxStacks) set_.stacks.push_back(engine_.push(s, parent));
    if (reach.final) leave(parent);
    for (const Grammar::Call& call : reach.calls) {
      const Reach& back = engine_.reach(call.target);
      // A frame with nothing left to do is not kept: lists written with recursion at the end stay flat.
      const bool tail = back.final && back.reading.empty() && back.calls.empty();
      const uint32_t below = tail ? parent : engine_.push(call.target, parent);
      if (below < kOpen && engine_.stacks_[below].depth > kMaxDepth) continue;
      todo_.emplace_back(engine_.grammar_->rules[call.rule], below);
    }
  }
  void leave(uint32_t parent) {
    if (parent == kBottom) {
      set_.complete = true;
    } else if (parent == kOpen) {
      set_.open = true;
    } else {
      const Stack& below = engine_.stacks_[parent];
      todo_.emplace_back(below.state, below.parent);
    }
  }

  Engine& engine_;
  Set set_;
  std::vector<std::pair<uint32_t, uint32_t>> todo_;
  std::unordered_set<uint64_t> visited_;
};

Engine::Engine(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const Vocabulary> vocabulary)
    : grammar_(std::move(grammar)), vocabulary_(std::move(vocabulary)), reach_(grammar_->states.size()) {
  std::vector<bool> cut(kAlphabet + 1);
  for (uint32_t letter = kBytes; letter <= kAlphabet; ++letter) cut[letter] = true;
  for (const Grammar::State& state : grammar_->states) {
    for (const Grammar::Edge& e : state.edges) {
      cut[e.low] = true;
      cut[e.high + 1u] = true;
    }
  }
  cut[0] = true;
  class_of_.resize(kAlphabet);
  for (uint32_t letter = 0; letter < kAlphabet; ++letter) {
    if (cut[letter]) letter_of_.push_back(static_cast<uint16_t>(letter));
    class_of_[letter] = static_cast<uint16_t>(letter_of_.size() - 1);
  }
  for (uint32_t i = 0; i < grammar_->symbols.size(); ++i) symbol_of_[grammar_->symbols[i]] = kBytes + i;
  intern({});  // kDead
  Closure closure(*this);
  closure.add(grammar_->rules[grammar_->start], kBottom);
  start_ = intern(closure.take());
}

const Engine::Reach& Engine::reach(uint32_t state) {
  if (reach_[state]) return *reach_[state];
  auto out = std::make_unique<Reach>();
  std::vector<uint32_t> todo{state};
  std::unordered_set<uint32_t> seen{state};
  while (!todo.empty()) {
    const uint32_t s = todo.back();
    todo.pop_back();
    const Grammar::State& at = grammar_->states[s];
    if (!at.edges.empty()) out->reading.push_back(s);
    out->calls.insert(out->calls.end(), at.calls.begin(), at.calls.end());
    out->final = out->final || at.final;
    for (const uint32_t t : at.skips)
      if (seen.insert(t).second) todo.push_back(t);
  }
  reach_[state] = std::move(out);
  return *reach_[state];
}

uint32_t Engine::push(uint32_t state, uint32_t parent) {
  const auto [at, fresh] =
      stack_ids_.try_emplace(uint64_t{state} << 32 | parent, static_cast<uint32_t>(stacks_.size()));
  if (fresh) stacks_.push_back({state, parent, parent >= kOpen ? 1 : stacks_[parent].depth + 1});
  return at->second;
}

Engine::Position Engine::intern(Set set) {
  uint64_t hash = (set.complete ? 1 : 0) | (set.open ? 2 : 0);
  for (const uint32_t s : set.stacks) hash = (hash ^ s) * 0x9E3779B97F4A7C15u + (hash >> 29);
  const auto [begin, end] = set_ids_.equal_range(hash);
  for (auto at = begin; at != end; ++at) {
    const Set& other = *sets_[at->second];
    if (other.complete == set.complete && other.open == set.open && other.stacks == set.stacks) return at->second;
  }
  const auto id = static_cast<Position>(sets_.size());
  sets_.push_back(std::make_unique<Set>(std::move(set)));
  set_ids_.emplace(hash, id);
  return id;
}

Engine::Position Engine::step(Position at, uint32_t letter) {
  const uint16_t c = class_of_[letter];
  Set& from = *sets_[at];
  if (from.next.empty()) from.next.assign(letter_of_.size(), kUnknown);
  if (from.next[c] != kUnknown) return from.next[c];
  Closure closure(*this);
  for (const uint32_t id : from.stacks) {
    const Stack stack = stacks_[id];
    for (const Grammar::Edge& e : grammar_->states[stack.state].edges)
      if (e.low <= letter && letter <= e.high) closure.add(e.target, stack.parent);
  }
  const Position to = intern(closure.take());
  sets_[at]->next[c] = to;
  return to;
}

Engine::Position Engine::bytes_after(Position at, std::string_view bytes) {
  for (const char c : bytes) {
    if (at == kDead) break;
    at = step(at, static_cast<unsigned char>(c));
  }
  return at;
}

Engine::Position Engine::after(Position at, std::string_view bytes) {
  const std::scoped_lock lock(mutex_);
  return bytes_after(at, bytes);
}

Engine::Position Engine::after(Position at, int32_t token) {
  const std::scoped_lock lock(mutex_);
  const auto symbol = symbol_of_.find(token);
  if (symbol != symbol_of_.end()) return step(at, symbol->second);
  const std::string_view text = vocabulary_->text(token);
  return text.empty() ? kDead : bytes_after(at, text);
}

bool Engine::complete(Position at) const {
  const std::scoped_lock lock(mutex_);
  return sets_[at]->complete;
}

bool Engine::finished(Position at) const {
  const std::scoped_lock lock(mutex_);
  return sets_[at]->complete && sets_[at]->stacks.empty();
}

/// Calls `take` with every node below `from` whose text may come at `at`.
template <class Take>
void Engine::walk(uint32_t from, Position at, const Take& take, std::vector<uint32_t>* leaving) {
  const std::span<const Vocabulary::Node> nodes = vocabulary_->nodes();
  const uint32_t base = nodes[from].depth;
  std::vector<Position> path(257, kDead);
  path[0] = at;
  uint32_t n = from + 1;
  const uint32_t end = nodes[from].end;
  while (n < end) {
    ++walked_;
    const Vocabulary::Node& node = nodes[n];
    const uint32_t depth = node.depth - base;
    const Position here = path[depth - 1];
    const Set& before = *sets_[here];
    const uint16_t c = class_of_[node.byte];
    const Position next = !before.next.empty() && before.next[c] != kUnknown ? before.next[c] : step(here, node.byte);
    if (next == kDead) {
      n = node.end;
      continue;
    }
    if (node.tokens > 0) take(node);
    const Set& set = *sets_[next];
    if (set.open && leaving != nullptr && node.end > n + 1) leaving->push_back(n);
    path[depth] = next;
    n = set.stacks.empty() ? node.end : n + 1;
  }
}

const Engine::Frame& Engine::frame(Position open) {
  const auto found = frames_.find(open);
  if (found != frames_.end()) return *found->second;
  if (frames_.size() >= kFrames) frames_.clear();
  auto out = std::make_unique<Frame>();
  const std::span<const int32_t> tokens = vocabulary_->tokens();
  walk(
      0, open,
      [&](const Vocabulary::Node& node) {
        for (uint32_t k = 0; k < node.tokens; ++k) out->few.push_back(tokens[node.first + k]);
      },
      &out->leaving);
  if (out->few.size() > kFew) {
    out->bits.assign((static_cast<size_t>(vocabulary_->size()) + 31) / 32, 0);
    for (const int32_t id : out->few) out->bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    out->few = {};
  }
  return *(frames_[open] = std::move(out));
}

/// Stacks with the same frames below are looked at together: what their tops allow does not depend on the rest.
void Engine::set_bits(Position at, std::span<uint32_t> bits) {
  std::vector<std::pair<uint32_t, uint32_t>> tops;  // parent, state
  for (const uint32_t id : sets_[at]->stacks) tops.emplace_back(stacks_[id].parent, stacks_[id].state);
  std::sort(tops.begin(), tops.end());
  const std::span<const int32_t> tokens = vocabulary_->tokens();
  const auto set = [&](int32_t id) {
    if (static_cast<size_t>(id) / 32 < bits.size()) bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  };
  for (size_t begin = 0; begin < tops.size();) {
    const uint32_t parent = tops[begin].first;
    Set open;
    size_t end = begin;
    for (; end < tops.size() && tops[end].first == parent; ++end) open.stacks.push_back(push(tops[end].second, kOpen));
    std::sort(open.stacks.begin(), open.stacks.end());
    const Frame& f = frame(intern(std::move(open)));
    for (const int32_t id : f.few) set(id);
    for (size_t i = 0; i < std::min(bits.size(), f.bits.size()); ++i) bits[i] |= f.bits[i];
    if (parent < kOpen && !f.leaving.empty()) {
      Closure closure(*this);
      closure.add(stacks_[parent].state, stacks_[parent].parent);
      const Position below = intern(closure.take());
      for (const uint32_t n : f.leaving) {
        walk(
            n, below,
            [&](const Vocabulary::Node& node) {
              for (uint32_t k = 0; k < node.tokens; ++k) set(tokens[node.first + k]);
            },
            nullptr);
      }
    }
    begin = end;
  }
  for (const auto& [token, letter] : symbol_of_)
    if (step(at, letter) != kDead) set(token);
}

void Engine::mask(Position at, std::span<uint32_t> bits) {
  const std::scoped_lock lock(mutex_);
  const auto known = masks_.find(at);
  if (known != masks_.end() && known->second.size() == bits.size()) {
    std::copy(known->second.begin(), known->second.end(), bits.begin());
    return;
  }
  std::fill(bits.begin(), bits.end(), 0u);
  set_bits(at, bits);
  if (masks_.size() >= kMasks) masks_.clear();
  masks_[at].assign(bits.begin(), bits.end());
}

std::string Engine::forced_bytes(Position at, size_t limit) {
  std::string out;
  while (out.size() < limit) {
    const Set& set = *sets_[at];
    if (set.complete || set.stacks.empty()) break;
    int letter = -1;
    for (const uint32_t id : set.stacks) {
      for (const Grammar::Edge& e : grammar_->states[stacks_[id].state].edges) {
        const bool same = e.low == e.high && e.low < kBytes && (letter == -1 || letter == e.low);
        letter = same ? e.low : -2;
        if (letter == -2) return out;
      }
    }
    out += static_cast<char>(letter);
    at = step(at, static_cast<uint32_t>(letter));
  }
  return out;
}

std::string Engine::forced(Position at, size_t limit) {
  const std::scoped_lock lock(mutex_);
  return forced_bytes(at, limit);
}

std::vector<int32_t> Engine::forced_tokens(Position at, size_t limit) {
  const std::scoped_lock lock(mutex_);
  const std::string text = forced_bytes(at, limit);
  std::vector<int32_t> out;
  std::string_view rest = text;
  while (!rest.empty()) {
    const int32_t token = vocabulary_->longest(rest);
    if (token < 0) break;
    const size_t length = vocabulary_->text(token).size();
    if (length == rest.size()) break;  // what follows may join it
    out.push_back(token);
    rest.remove_prefix(length);
  }
  return out;
}

bool Engine::full() const {
  const std::scoped_lock lock(mutex_);
  return stacks_.size() > kFullStacks || sets_.size() > kFullSets;
}

Engine::Position Engine::import(const Engine& other, Position at) {
  if (&other == this || at == kDead) return at;
  const std::scoped_lock lock(mutex_, other.mutex_);
  const Set& from = *other.sets_[at];
  Set to;
  to.complete = from.complete;
  to.open = from.open;
  for (const uint32_t id : from.stacks) {
    std::vector<uint32_t> path;  // of states, top first
    uint32_t s = id;
    for (; s < kOpen; s = other.stacks_[s].parent) path.push_back(other.stacks_[s].state);
    for (auto state = path.rbegin(); state != path.rend(); ++state) s = push(*state, s);
    to.stacks.push_back(s);
  }
  std::sort(to.stacks.begin(), to.stacks.end());
  return intern(std::move(to));
}

Engine::Counts Engine::counts() const {
  const std::scoped_lock lock(mutex_);
  return {stacks_.size(), sets_.size(), masks_.size(), frames_.size(), walked_};
}

}  // namespace glm53::grammar
