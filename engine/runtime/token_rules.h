// Constraints on whole tokens: forced tool calls, a choice among texts, words that must not come, a thinking budget.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/grammar/engine.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/sampling.h"

namespace glm53 {

/// What wire::Submit::grammar says: one rule a line, each a word and token ids or a number.
///   reasoning            the output begins inside a think block; calls and choices are demanded from its end on
///   think_end ID         the token that ends it
///   budget N             so many tokens may be thought, then the block is ended
///   call BEGIN END KEY   the output is calls; their markup, KEY being what begins an argument
///   single               one call, not several
///   name ID…             tokens of a name that may be called (several lines)
///   choice ID…           tokens of a text that may be the output (several lines)
///   alternative ID       a token that may begin the output instead of a choice; what follows is free
///   grammar DEMAND       the output is a text of a grammar: DEMAND as in engine/grammar/compile.h, one line
///   opens ID             the token with which the grammar may begin inside the think block, ending it
///   within               the output is free, but what begins with that token is a text of the grammar
///   bad ID…              tokens that must not follow each other anywhere, calls' markup and choices excepted, and in a
///                        grammar only where something else may come
/// While something is demanded and not there yet, no end token is allowed.
class TokenRules final : public TokenConstraint {
 public:
  /// Throws Error(usage) that names the line.
  TokenRules(std::string_view text, const TokenSpace& space);

  /// The output is complete: only an end token can follow.
  bool terminated() const override;
  /// Sets the bit of every token that may come next (id / 32, id % 32) and clears all others.
  void mask(std::span<uint32_t> bits) const override;
  /// False, and nothing changes, when the token may not come.
  bool try_accept(int32_t token) override;
  void rollback(int tokens) override;
  /// Tokens that must come next, one after the other: where the grammar leaves one way only.
  std::vector<int32_t> forced() const;

 private:
  enum class Mode : uint8_t { reasoning, start, name, body, after, choice, grammar, free };
  struct State {
    Mode mode = Mode::start;
    uint32_t node = 0;    ///< of a trie; position in the grammar
    int64_t thought = 0;  ///< tokens
  };
  struct Node {
    std::map<int32_t, uint32_t> next;
    bool end = false;
  };
  using Trie = std::vector<Node>;

  void rule(std::string_view word, std::span<const int32_t> ids);
  static void insert(Trie& trie, std::span<const int32_t> ids);
  bool demands() const { return !names_.empty() || !choices_.empty() || (grammar_ != nullptr && !within_); }
  bool spent(const State& state) const { return budget_ >= 0 && state.thought >= budget_; }
  bool is_end(int32_t token) const;
  std::optional<State> next(const State& state, int32_t token) const;
  std::optional<State> first(int32_t token) const;
  std::optional<State> in_grammar(uint32_t position, int32_t token) const;
  void grammar_mask(uint32_t position, std::span<uint32_t> bits) const;
  void renew_grammar();
  void forbid_words(std::span<uint32_t> bits) const;
  template <class Use>
  void listed(const State& state, const Use& use) const;

  std::vector<int32_t> ends_;
  int32_t vocab_ = 0;
  int32_t think_end_ = -1, call_ = -1, call_end_ = -1, arg_key_ = -1, alternative_ = -1, opens_ = -1;
  int64_t budget_ = -1;
  bool reasoning_ = false, single_ = false, within_ = false;
  std::shared_ptr<grammar::Engine> grammar_;  ///< null: none
  Trie names_, choices_;
  std::vector<std::vector<int32_t>> bad_;
  std::vector<State> states_;    ///< one before every token, and the present one
  std::vector<int32_t> tokens_;  ///< of the output
};

/// What is wrong with the rules, as a sentence for the client; empty when nothing is.
std::string check_rules(std::string_view text, const TokenSpace& space);

}  // namespace glm53
