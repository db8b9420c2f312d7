// Grammars over bytes: rules whose bodies are automata that may call each other, and the builder that makes them.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace glm53::grammar {

/// The alphabet: bytes, and behind them single tokens that stand for themselves ("symbols"), such as <tool_call>.
inline constexpr uint32_t kBytes = 256, kMaxSymbols = 32, kAlphabet = kBytes + kMaxSymbols;
using ByteSet = std::bitset<kBytes>;

/// What compiling may cost. Counted, never timed, so that a grammar is refused everywhere or nowhere.
struct Limits {
  uint64_t work = 600'000;   ///< steps of all kinds
  uint32_t states = 60'000;  ///< of the automata
  uint32_t rules = 8'000;
  uint32_t repeat = 8'192;   ///< highest count of a repetition
  size_t text = 512u << 10;  ///< bytes of a schema or grammar
};
class Budget {
 public:
  explicit Budget(const Limits& limits = {}) : limits_(limits) {}
  const Limits& limits() const { return limits_; }
  uint64_t used() const { return used_; }
  /// Throws Error(usage) once more than the limit is spent.
  void spend(uint64_t work);

 private:
  Limits limits_;
  uint64_t used_ = 0;
};

/// A compiled grammar; immutable. State numbers run through all rules.
struct Grammar {
  struct Edge {
    uint16_t low = 0, high = 0;  ///< of the alphabet, both included
    uint32_t target = 0;
  };
  struct Call {
    uint32_t rule = 0, target = 0;
  };
  struct State {
    std::vector<Edge> edges;
    std::vector<Call> calls;
    std::vector<uint32_t> skips;  ///< targets reached without reading
    bool final = false;
  };
  std::vector<State> states;
  std::vector<uint32_t> rules;   ///< first state of each
  uint32_t start = 0;            ///< rule
  std::vector<int32_t> symbols;  ///< token of each symbol
};

/// Expressions are numbers; each may be used any number of times.
class Builder {
 public:
  using Id = uint32_t;
  static constexpr int kUnbounded = -1;

  explicit Builder(Budget& budget);
  Budget& budget() { return *budget_; }

  Id empty() const { return 0; }    ///< matches the empty text
  Id nothing() const { return 1; }  ///< matches no text
  Id set(const ByteSet& bytes);
  Id range(uint8_t low, uint8_t high);
  Id symbol(int32_t token);
  Id text(std::string_view text);
  /// One of the texts; their number matters little.
  Id literals(std::vector<std::string> texts);
  Id seq(std::vector<Id> parts);
  Id alt(std::vector<Id> parts);
  Id optional(Id part) { return alt({part, empty()}); }
  /// `max` kUnbounded: no limit. Throws Error(usage) above Limits::repeat.
  Id repeat(Id part, int64_t min, int64_t max);
  Id call(uint32_t rule);
  /// An automaton whose first state is the start.
  Id automaton(std::vector<std::vector<Grammar::Edge>> states, std::vector<bool> final);
  /// Texts that match both, or `a` and not `b`. Neither may call rules.
  Id both(Id a, Id b) { return product(a, b, false); }
  Id without(Id a, Id b) { return product(a, b, true); }

  uint32_t rule(std::string name);
  void define(uint32_t rule, Id body);
  uint32_t add_rule(std::string name, Id body);

  /// Throws Error(usage) when no text matches, for left recursion, and beyond the limits.
  Grammar finish(uint32_t start);

 private:
  enum class Kind : uint8_t { empty, nothing, set, symbol, text, literals, seq, alt, repeat, call, dfa };
  struct Dfa {
    std::vector<std::vector<Grammar::Edge>> states;  ///< the first is the start
    std::vector<bool> final;
  };
  struct Node {
    Kind kind = Kind::empty;
    uint32_t a = 0;  ///< symbol, rule, index of a dfa
    int64_t min = 0, max = 0;
    ByteSet bytes;
    std::vector<std::string> texts;
    std::vector<Id> parts;
  };
  struct Rule {
    std::string name;
    Id body = 1;
    bool defined = false;
  };

  Id add(Node node);
  Id product(Id a, Id b, bool without);
  uint32_t emit(std::vector<Grammar::State>& out, Id id, uint32_t from);
  uint32_t emit_repeat(std::vector<Grammar::State>& out, const Node& node, uint32_t from);
  void emit_trie(std::vector<Grammar::State>& out, const std::vector<std::string>& texts, size_t begin, size_t end,
                 size_t depth, uint32_t from, uint32_t to);
  uint32_t emit_dfa(std::vector<Grammar::State>& out, const Dfa& dfa, uint32_t from);
  uint32_t new_state(std::vector<Grammar::State>& out);

  Budget* budget_;
  std::vector<Node> nodes_;
  std::vector<Rule> rules_;
  std::vector<Dfa> dfas_;
  std::vector<int32_t> symbols_;
};

}  // namespace glm53::grammar
