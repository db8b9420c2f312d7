// Splits what a model writes into reasoning, content and tool calls.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer.h"
#include "engine/text/tool_arguments.h"

namespace glm53::text {

enum class OutputKind {
  reasoning,
  content,
  call_name,       ///< a call begins; `text` is its whole name, once
  call_arguments,  ///< the next piece of its arguments' JSON
};
/// A piece of the answer; never empty.
struct OutputEvent {
  OutputKind kind = OutputKind::content;
  std::string text;
  int call = -1;  ///< of calls: 0, 1, …
  bool operator==(const OutputEvent&) const = default;
};

/// Where an output begins.
struct OutputStart {
  bool reasoning = false;    ///< inside an open think block
  bool after_think = false;  ///< right behind </think>: white space before the first text is dropped
};
/// From the rendered prompt, never from request flags: its last id, or, when an open turn is continued, the last think
/// token of the turn.
OutputStart output_start(const Tokenizer& tokenizer, std::span<const int32_t> prompt, bool continues_turn);

/// What a request says about calls.
struct ToolParsing {
  std::shared_ptr<const ToolSet> tools;  ///< null: call tokens are plain text
  bool single = false;                   ///< the output ends with its first call
};

/// State machine over ids, one a choice. Structure is recognised by token id; the same characters spelled with ordinary
/// tokens are text, but for the tags inside an open call and outside its values. Special tokens are never shown. A call
/// of an undeclared function is content. Streamed and one-shot results are the same, whatever the number of tokens a
/// step.
class OutputParser {
 public:
  OutputParser(const Tokenizer& tokenizer, OutputStart start, ToolParsing calls = {});
  /// Appends events; adjacent ones of a kind and call are merged by the caller if it likes.
  void push(int32_t token, std::vector<OutputEvent>& events);
  /// End of the output. `cut`: by a limit, so that an open call stays unfinished; else it is closed.
  void finish(bool cut, std::vector<OutputEvent>& events);
  /// Tokens reported as reasoning so far, without tags.
  int64_t reasoning_tokens() const { return reasoning_tokens_; }
  bool in_reasoning() const { return state_ == State::reasoning; }
  /// Calls of declared functions.
  int calls() const { return calls_; }
  /// The one call there may be is complete: nothing more is taken.
  bool done() const { return done_; }

 private:
  enum class State { reasoning, content, name, key, between, value, after };
  enum class Tag { none, think, think_end, call, call_end, key, key_end, value, value_end };
  using Events = std::vector<OutputEvent>;

  Tag tag_of(int32_t token) const;
  bool in_call() const { return state_ >= State::name; }
  void tag(Tag tag, std::string_view spelled, Events& events);
  bool outer_tag(Tag tag, std::string_view spelled);
  void call_tag(Tag tag, std::string_view spelled, Events& events);
  void text(std::string_view text, Events& events);
  void call_text(std::string_view text, Events& events);
  void flush_held(Events& events);
  void content(std::string_view text, Events& events);
  void open_call(std::string_view spelled);
  void take(std::string_view text, Events& events);
  void source(std::string_view text, Events& events);
  void complete_name(Events& events);
  void complete_key();
  void begin_value(Events& events);
  void end_value(Events& events);
  void close_call(Events& events);
  void arguments(std::string text, Events& events);

  const Tokenizer* tokenizer_;
  Detokenizer detokenizer_;
  ToolParsing parsing_;
  bool started_in_reasoning_;
  State state_;
  bool segment_open_ = false;  ///< no text of this content segment yet: white space is held back
  bool drop_space_ = false;    ///< the segment began at </think>
  std::string space_;
  int64_t reasoning_tokens_ = 0;

  // The open call.
  std::string held_;    ///< text outside values that may become a tag
  std::string source_;  ///< of the block, until its name is complete
  std::string name_, key_, value_;
  bool named_ = false, known_ = false;    ///< the name is complete; it is declared
  bool streamed_ = false, skip_ = false;  ///< the value is sent as it arrives; is that of a repeated key
  std::unordered_set<std::string> keys_;
  int calls_ = 0;
  bool done_ = false;
};

}  // namespace glm53::text
