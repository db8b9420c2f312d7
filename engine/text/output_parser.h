// Splits what a model writes into reasoning and content.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer.h"

namespace glm53::text {

enum class OutputKind { reasoning, content };
/// A piece of visible text. (Tool calls will join these as kinds of their own.)
struct OutputEvent {
  OutputKind kind = OutputKind::content;
  std::string text;
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

/// State machine over ids, one a choice. Structure is recognised by token id; the same characters spelled with ordinary
/// tokens are text. Special tokens are never shown. Tool-call tokens are plain text here: tool calls are not parsed
/// yet. Streamed and one-shot results are the same, whatever the number of tokens a step.
class OutputParser {
 public:
  OutputParser(const Tokenizer& tokenizer, OutputStart start);
  /// Appends events; adjacent ones of a kind are merged by the caller if it likes.
  void push(int32_t token, std::vector<OutputEvent>& events);
  /// End of the output.
  void finish(std::vector<OutputEvent>& events);
  /// Tokens reported as reasoning so far, without the think tags.
  int64_t reasoning_tokens() const { return reasoning_tokens_; }
  bool in_reasoning() const { return reasoning_; }

 private:
  void text(std::string text, std::vector<OutputEvent>& events);

  const Tokenizer* tokenizer_;
  Detokenizer detokenizer_;
  bool started_in_reasoning_, reasoning_;
  bool segment_open_ = false;  ///< no text of this content segment yet: white space is held back
  bool drop_space_ = false;    ///< the segment began at </think>
  std::string space_;
  int64_t reasoning_tokens_ = 0;
};

}  // namespace glm53::text
