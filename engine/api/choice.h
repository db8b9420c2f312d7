// One choice of an answer: token ids in, visible text and its end out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/runtime/wire.h"
#include "engine/text/output_parser.h"
#include "engine/text/stop_matcher.h"
#include "engine/text/tokenizer.h"

namespace glm53::api {

/// A sampled token with its log-probabilities, for the answer.
struct ScoredToken {
  int32_t token = 0;
  wire::TokenLogprobs score;
};

/// Text that became visible, with the tokens behind it.
struct ChoiceEvent {
  text::OutputKind kind = text::OutputKind::content;
  std::string text;
  std::vector<ScoredToken> scores;  ///< filled when log-probabilities were asked for
  std::vector<int32_t> token_ids;
  int call = -1;             ///< of tool calls: its number
  std::string call_id = {};  ///< with its name
};

/// Why it ended: nothing, a token, or a stop string.
using StopReason = std::variant<std::monostate, int32_t, std::string>;

struct ChoiceOptions {
  bool parse = true;  ///< chat: split reasoning from content; else raw text
  text::OutputStart start;
  std::vector<std::string> stop;
  bool include_stop = false;
  bool skip_special = true;       ///< of raw text
  int32_t min_tokens = 0;         ///< stop strings are not looked for before
  std::vector<int32_t> stop_ids;  ///< of the request
  int32_t primary_eos = -1;       ///< an end that is reported as null
  bool logprobs = false, token_ids = false;
  text::ToolParsing calls;  ///< chat with tools
  bool named_call = false;  ///< the request names the function: its call ends with "stop"
  bool reasoning = true;    ///< false: reasoning is counted but not shown
};

class Choice {
 public:
  Choice(const text::Tokenizer& tokenizer, ChoiceOptions options);

  /// Takes a delta of the rank (tokens in order, none twice). Appends what became visible. Nothing is taken after the
  /// end.
  void consume(const wire::Delta& delta, std::vector<ChoiceEvent>& events);

  bool finished() const { return !finish_reason_.empty(); }
  /// "stop", "length" or "tool_calls".
  const std::string& finish_reason() const { return finish_reason_; }
  const StopReason& stop_reason() const { return stop_reason_; }
  /// Set when the choice ended before the rank said so (stop string): how many tokens the prefix cache may keep.
  const std::optional<uint32_t>& cut() const { return cut_; }
  /// Tokens that produced no text since the last event: belong to the last chunk.
  ChoiceEvent take_rest() { return std::exchange(pending_, {}); }
  int64_t completion_tokens() const { return completion_tokens_; }
  int64_t reasoning_tokens() const { return parser_.reasoning_tokens(); }
  uint32_t cached_tokens() const { return cached_tokens_; }
  /// Drafts that were verified for it, and of these accepted ones.
  uint32_t drafted() const { return drafted_; }
  uint32_t accepted() const { return accepted_; }

 private:
  void feed(int32_t token, std::vector<ChoiceEvent>& events);
  void content(const std::string& text, std::vector<ChoiceEvent>& events);
  void parsed(const std::vector<text::OutputEvent>& events, std::vector<ChoiceEvent>& out);
  void emit(const text::OutputEvent& event, std::vector<ChoiceEvent>& events);
  void release(std::vector<ChoiceEvent>& events);
  std::string stop_word() const;
  void end(const wire::Delta& delta, std::vector<ChoiceEvent>& events);
  void stopped(const text::StopMatcher::Match& match);
  bool is_end(const wire::Delta& delta, size_t index) const;

  ChoiceOptions options_;
  text::OutputParser parser_;
  text::Detokenizer raw_;
  text::StopMatcher matcher_;
  ChoiceEvent pending_;           ///< tokens whose text is not out yet
  std::vector<size_t> searched_;  ///< content bytes after each token, kept when there are stop strings
  size_t content_bytes_ = 0;
  int64_t completion_tokens_ = 0;
  uint32_t cached_tokens_ = 0, drafted_ = 0, accepted_ = 0;
  std::string finish_reason_;
  StopReason stop_reason_;
  std::optional<uint32_t> cut_;
};

}  // namespace glm53::api
