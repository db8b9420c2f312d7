#include "engine/text/output_parser.h"

#include "engine/text/utf8.h"

namespace glm53::text {

OutputStart output_start(const Tokenizer& tokenizer, std::span<const int32_t> prompt, bool continues_turn) {
  const ChatTokens& t = tokenizer.chat();
  if (prompt.empty()) return {};
  if (!continues_turn) return {prompt.back() == t.think, prompt.back() == t.think_end};
  for (size_t i = prompt.size(); i-- > 0;) {
    const int32_t id = prompt[i];
    if (id == t.think) return {true, false};
    if (id == t.think_end) return {false, i + 1 == prompt.size()};
    if (id == t.system || id == t.user || id == t.assistant || id == t.observation) break;
  }
  return {};
}

OutputParser::OutputParser(const Tokenizer& tokenizer, OutputStart start)
    : tokenizer_(&tokenizer),
      detokenizer_(tokenizer, true),
      started_in_reasoning_(start.reasoning),
      reasoning_(start.reasoning),
      segment_open_(!start.reasoning),
      drop_space_(start.after_think) {}

void OutputParser::push(int32_t token, std::vector<OutputEvent>& events) {
  const ChatTokens& t = tokenizer_->chat();
  const bool opens = token == t.think && (reasoning_ || started_in_reasoning_);
  const bool closes = token == t.think_end;
  std::string shown;
  if (!opens && !closes) {
    if (reasoning_ && tokenizer_->has_text(token) && !tokenizer_->is_special(token)) ++reasoning_tokens_;
    detokenizer_.push(token, shown);
    text(std::move(shown), events);
    return;
  }
  detokenizer_.finish(shown);  // a tag is an added token: nothing combines across it
  text(std::move(shown), events);
  if (opens) {
    reasoning_ = true;
    space_.clear();
  } else if (reasoning_) {
    reasoning_ = false;
    segment_open_ = true;
    drop_space_ = true;
  }
}

void OutputParser::finish(std::vector<OutputEvent>& events) {
  std::string shown;
  detokenizer_.finish(shown);
  text(std::move(shown), events);
  space_.clear();
}

void OutputParser::text(std::string text, std::vector<OutputEvent>& events) {
  if (text.empty()) return;
  if (reasoning_) {
    events.push_back({OutputKind::reasoning, std::move(text)});
    return;
  }
  if (segment_open_) {
    const size_t space = leading_space(text);
    if (space == text.size()) {
      space_ += text;
      return;
    }
    text = drop_space_ ? text.substr(space) : space_ + text;
    space_.clear();
    segment_open_ = false;
  }
  events.push_back({OutputKind::content, std::move(text)});
}

}  // namespace glm53::text
