#include "engine/runtime/token_rules.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"
#include "engine/grammar/compile.h"

namespace glm53 {
namespace {

constexpr size_t kMaxIds = 1u << 20;

void set_bit(std::span<uint32_t> bits, int32_t id) {
  bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
}
void clear_bit(std::span<uint32_t> bits, int32_t id) {
  bits[static_cast<size_t>(id) / 32] &= ~(1u << (id % 32));
}

}  // namespace

TokenRules::TokenRules(std::string_view text, const TokenSpace& space) : ends_(space.eos), vocab_(space.vocab) {
  size_t total = 0, number = 0;
  for (const std::string& line : split(std::string(text), '\n')) {
    ++number;
    if (line.empty()) continue;
    if (line.starts_with("grammar ")) {
      if (space.grammars == nullptr)
        throw Error(Code::unavailable, "structured output needs the tokenizer.json of the model on rank 0");
      grammar_ = space.grammars->get(line.substr(8));
      continue;
    }
    const std::vector<std::string> words = split(line, ' ');
    std::vector<int32_t> ids;
    for (size_t i = 1; i < words.size(); ++i) {
      const auto id = parse_int(words[i]);
      const bool good = id && *id >= 0 && *id <= INT32_MAX && (*id < vocab_ || words[0] == "budget");
      if (!good) throw Error(Code::usage, cat("grammar, line ", number, ": \"", words[i], "\" is no token"));
      ids.push_back(static_cast<int32_t>(*id));
    }
    total += ids.size();
    if (total > kMaxIds) throw Error(Code::usage, cat("grammar: more than ", kMaxIds, " tokens"));
    try {
      rule(words[0], ids);
    } catch (const Error& e) {
      throw Error(Code::usage, cat("grammar, line ", number, ": ", e.what()));
    }
  }
  if ((reasoning_ || budget_ >= 0) && think_end_ < 0) throw Error(Code::usage, "grammar: think_end is missing");
  if (names_.empty() != (call_ < 0)) throw Error(Code::usage, "grammar: call and name need each other");
  if (within_ && (grammar_ == nullptr || opens_ < 0))
    throw Error(Code::usage, "grammar: within needs grammar and opens");
  if (grammar_ != nullptr && (!names_.empty() || !choices_.empty()))
    throw Error(Code::usage, "grammar: either a grammar, or call or choice");
  if (!names_.empty() && !choices_.empty()) throw Error(Code::usage, "grammar: either call or choice");
  states_.push_back({reasoning_ ? Mode::reasoning : Mode::start, 0, 0});
}

void TokenRules::insert(Trie& trie, std::span<const int32_t> ids) {
  if (trie.empty()) trie.emplace_back();
  uint32_t at = 0;
  for (const int32_t id : ids) {
    const auto [place, fresh] = trie[at].next.try_emplace(id, static_cast<uint32_t>(trie.size()));
    at = place->second;
    if (fresh) trie.emplace_back();
  }
  trie[at].end = true;
}

void TokenRules::rule(std::string_view word, std::span<const int32_t> ids) {
  const auto need = [&](bool good) {
    if (!good) throw Error(Code::usage, cat(word, " with ", ids.size(), " values"));
  };
  if (word == "reasoning" || word == "single" || word == "within") {
    need(ids.empty());
    (word == "single" ? single_ : word == "within" ? within_ : reasoning_) = true;
  } else if (word == "think_end" || word == "alternative" || word == "opens") {
    need(ids.size() == 1);
    (word == "think_end" ? think_end_ : word == "opens" ? opens_ : alternative_) = ids[0];
  } else if (word == "budget") {
    need(ids.size() == 1);
    budget_ = ids[0];
  } else if (word == "call") {
    need(ids.size() == 3);
    call_ = ids[0];
    call_end_ = ids[1];
    arg_key_ = ids[2];
  } else if (word == "name" || word == "choice") {
    need(!ids.empty());
    insert(word == "name" ? names_ : choices_, ids);
  } else if (word == "bad") {
    need(!ids.empty());
    bad_.emplace_back(ids.begin(), ids.end());
  } else {
    throw Error(Code::usage, cat("unknown rule \"", word, "\""));
  }
}

bool TokenRules::is_end(int32_t token) const {
  return std::find(ends_.begin(), ends_.end(), token) != ends_.end();
}

bool TokenRules::terminated() const {
  const State& s = states_.back();
  if (s.mode == Mode::choice) return choices_[s.node].end && choices_[s.node].next.empty();
  if (s.mode == Mode::grammar) return grammar_->finished(s.node);
  return s.mode == Mode::after && single_;
}

/// The first token of what is demanded.
std::optional<TokenRules::State> TokenRules::first(int32_t token) const {
  if (!names_.empty()) return token == call_ ? std::optional(State{Mode::name, 0, 0}) : std::nullopt;
  if (grammar_ != nullptr && !within_ && token != alternative_) return in_grammar(grammar_->start(), token);
  if (within_ && token == opens_) return in_grammar(grammar_->start(), token);
  if (choices_.empty() || token == alternative_) return State{Mode::free, 0, 0};
  const auto found = choices_[0].next.find(token);
  return found == choices_[0].next.end() ? std::nullopt : std::optional(State{Mode::choice, found->second, 0});
}

/// The state behind a token that comes at a position in the grammar.
std::optional<TokenRules::State> TokenRules::in_grammar(uint32_t position, int32_t token) const {
  if (is_end(token))
    return grammar_->complete(position) ? std::optional(State{Mode::grammar, position, 0}) : std::nullopt;
  const uint32_t next = grammar_->after(position, token);
  if (next == grammar::Engine::kDead) return std::nullopt;
  if (within_ && grammar_->finished(next)) return State{Mode::free, 0, 0};
  return State{Mode::grammar, next, 0};
}

/// The state behind a token; nothing when it may not come. (Words that must not come are looked at by mask().)
std::optional<TokenRules::State> TokenRules::next(const State& s, int32_t token) const {
  State out = s;
  switch (s.mode) {
    case Mode::reasoning:
      if (token == think_end_) return State{Mode::start, 0, s.thought};
      if (spent(s) || (demands() && is_end(token))) return std::nullopt;
      // A call ends the thinking by itself.
      if (!names_.empty() && token == call_) return State{Mode::name, 0, s.thought};
      if (grammar_ != nullptr && token == opens_) return in_grammar(grammar_->start(), token);
      ++out.thought;
      return out;
    case Mode::start:
      return first(token);
    case Mode::name: {
      const Node& node = names_[s.node];
      const auto found = node.next.find(token);
      if (found != node.next.end()) {
        out.node = found->second;
        return out;
      }
      if (node.end && token == arg_key_) return State{Mode::body, 0, 0};
      if (node.end && token == call_end_) return State{Mode::after, 0, 0};
      return std::nullopt;
    }
    case Mode::body:
      if (is_end(token) || (single_ && token == call_)) return std::nullopt;
      if (token == call_) return State{Mode::name, 0, 0};
      if (token == call_end_) return State{Mode::after, 0, 0};
      return out;
    case Mode::after:
      if (is_end(token)) return out;
      return token == call_ && !single_ ? std::optional(State{Mode::name, 0, 0}) : std::nullopt;
    case Mode::choice: {
      const Node& node = choices_[s.node];
      const auto found = node.next.find(token);
      if (found == node.next.end()) return node.end && is_end(token) ? std::optional(out) : std::nullopt;
      out.node = found->second;
      return out;
    }
    case Mode::grammar:
      return in_grammar(s.node, token);
    case Mode::free:
      if (within_ && token == opens_) return in_grammar(grammar_->start(), token);
      break;
  }
  return out;
}

/// Calls `use` with every token that may come, in the modes in which these are few.
template <class Use>
void TokenRules::listed(const State& s, const Use& use) const {
  const auto children = [&](const Node& node) {
    for (const auto& [id, child] : node.next) use(id);
  };
  if (s.mode == Mode::reasoning) use(think_end_);
  if (s.mode == Mode::start) {
    if (names_.empty())
      children(choices_[0]);
    else
      use(call_);
    if (names_.empty() && alternative_ >= 0) use(alternative_);
  }
  if (s.mode == Mode::name) {
    children(names_[s.node]);
    if (names_[s.node].end) {
      use(arg_key_);
      use(call_end_);
    }
  }
  if (s.mode == Mode::choice) children(choices_[s.node]);
  if (s.mode == Mode::after && !single_) use(call_);
  if (s.mode == Mode::after || (s.mode == Mode::choice && choices_[s.node].end))
    for (const int32_t id : ends_) use(id);
}

void TokenRules::grammar_mask(uint32_t position, std::span<uint32_t> bits) const {
  const auto fill = [&] {
    grammar_->mask(position, bits);
    if (!grammar_->complete(position)) return;
    for (const int32_t id : ends_) set_bit(bits, id);
  };
  const auto any = [&] { return std::any_of(bits.begin(), bits.end(), [](uint32_t word) { return word != 0; }); };
  fill();
  if (!bad_.empty()) {
    forbid_words(bits);
    if (!any()) fill();
  }
  // At a limit of the engine nothing may be left: then the output ends, rather than the server.
  if (!any())
    for (const int32_t id : ends_) set_bit(bits, id);
}

std::vector<int32_t> TokenRules::forced() const {
  const State& s = states_.back();
  if (grammar_ == nullptr || s.mode != Mode::grammar) return {};
  return grammar_->forced_tokens(s.node, 256);
}

/// Moves to an engine that has not remembered so much.
void TokenRules::renew_grammar() {
  if (grammar_ == nullptr || !grammar_->full()) return;
  const std::shared_ptr<grammar::Engine> fresh = grammar_->fresh();
  for (State& s : states_)
    if (s.mode == Mode::grammar) s.node = fresh->import(*grammar_, s.node);
  grammar_ = fresh;
}

void TokenRules::mask(std::span<uint32_t> bits) const {
  const State& s = states_.back();
  const bool at_start = s.mode == Mode::start && grammar_ != nullptr && !within_;
  if (s.mode == Mode::grammar || at_start) {
    grammar_mask(at_start ? grammar_->start() : s.node, bits);
    if (at_start && alternative_ >= 0) set_bit(bits, alternative_);
    return;
  }
  const bool all = s.mode == Mode::free || s.mode == Mode::body || (s.mode == Mode::reasoning && !spent(s)) ||
                   (s.mode == Mode::start && !demands());
  std::fill(bits.begin(), bits.end(), all ? ~0u : 0u);
  if (!all) {
    listed(s, [&](int32_t id) { set_bit(bits, id); });
    return;
  }
  const bool open = s.mode == Mode::body || (s.mode == Mode::reasoning && demands());
  if (open)
    for (const int32_t id : ends_) clear_bit(bits, id);
  if (s.mode == Mode::body && single_) clear_bit(bits, call_);
  forbid_words(bits);
}

void TokenRules::forbid_words(std::span<uint32_t> bits) const {
  for (const std::vector<int32_t>& word : bad_) {
    const size_t before = word.size() - 1;
    if (before > tokens_.size()) continue;
    if (std::equal(word.begin(), word.end() - 1, tokens_.end() - static_cast<std::ptrdiff_t>(before)))
      clear_bit(bits, word.back());
  }
}

bool TokenRules::try_accept(int32_t token) {
  if (token < 0 || token >= vocab_) return false;
  renew_grammar();
  const auto state = next(states_.back(), token);
  if (!state) return false;
  states_.push_back(*state);
  tokens_.push_back(token);
  return true;
}

void TokenRules::rollback(int tokens) {
  const auto n = std::min(static_cast<size_t>(std::max(tokens, 0)), tokens_.size());
  tokens_.resize(tokens_.size() - n);
  states_.resize(states_.size() - n);
}

std::string check_rules(std::string_view text, const TokenSpace& space) {
  try {
    if (!text.empty()) TokenRules(text, space);
    return {};
  } catch (const Error& e) {
    return e.what();
  }
}

}  // namespace glm53
