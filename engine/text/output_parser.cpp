#include "engine/text/output_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/text/json_text.h"
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

OutputParser::OutputParser(const Tokenizer& tokenizer, OutputStart start, ToolParsing calls)
    : tokenizer_(&tokenizer),
      detokenizer_(tokenizer, true),
      parsing_(std::move(calls)),
      started_in_reasoning_(start.reasoning),
      state_(start.reasoning ? State::reasoning : State::content),
      segment_open_(!start.reasoning),
      drop_space_(start.after_think) {}

OutputParser::Tag OutputParser::tag_of(int32_t token) const {
  const ChatTokens& t = tokenizer_->chat();
  if (token == t.think) return Tag::think;
  if (token == t.think_end) return Tag::think_end;
  if (parsing_.tools == nullptr) return Tag::none;
  if (token == t.tool_call) return Tag::call;
  if (token == t.tool_call_end) return Tag::call_end;
  if (token == t.arg_key) return Tag::key;
  if (token == t.arg_key_end) return Tag::key_end;
  if (token == t.arg_value) return Tag::value;
  if (token == t.arg_value_end) return Tag::value_end;
  return Tag::none;
}

void OutputParser::push(int32_t token, Events& events) {
  if (done_) return;
  const Tag found = tag_of(token);
  std::string shown;
  if (found == Tag::none) {
    const bool visible = tokenizer_->has_text(token) && !tokenizer_->is_special(token);
    if (state_ == State::reasoning && visible) ++reasoning_tokens_;
    detokenizer_.push(token, shown);
    text(shown, events);
    return;
  }
  detokenizer_.finish(shown);  // a tag is an added token: nothing combines across it
  text(shown, events);
  flush_held(events);
  if (!done_) tag(found, tokenizer_->bytes(token), events);
}

void OutputParser::finish(bool cut, Events& events) {
  if (done_) return;
  std::string shown;
  detokenizer_.finish(shown);
  text(shown, events);
  flush_held(events);
  if (in_call() && !cut) close_call(events);
  space_.clear();
}

void OutputParser::text(std::string_view text, Events& events) {
  if (text.empty() || done_) return;
  if (state_ == State::reasoning) {
    events.push_back({OutputKind::reasoning, std::string(text)});
  } else if (state_ == State::content) {
    content(text, events);
  } else {
    call_text(text, events);
  }
}

void OutputParser::content(std::string_view text, Events& events) {
  std::string out(text);
  if (segment_open_) {
    const size_t space = leading_space(out);
    if (space == out.size()) {
      space_ += out;
      return;
    }
    out = drop_space_ ? out.substr(space) : space_ + out;
    space_.clear();
    segment_open_ = false;
  }
  events.push_back({OutputKind::content, std::move(out)});
}

void OutputParser::tag(Tag tag, std::string_view spelled, Events& events) {
  if (in_call()) {
    call_tag(tag, spelled, events);
  } else if (!outer_tag(tag, spelled)) {
    text(spelled, events);
  }
}

/// Outside calls. False: plain text.
bool OutputParser::outer_tag(Tag tag, std::string_view spelled) {
  if (tag == Tag::think) {
    if (state_ == State::content && !started_in_reasoning_) return false;
    state_ = State::reasoning;
    space_.clear();
  } else if (tag == Tag::call) {
    if (state_ == State::reasoning) {
      segment_open_ = true;
      drop_space_ = false;
    }
    open_call(spelled);
  } else if (tag == Tag::think_end && state_ == State::reasoning) {
    state_ = State::content;
    segment_open_ = true;
    drop_space_ = true;
  }
  return true;  // any other tag is swallowed
}

void OutputParser::open_call(std::string_view spelled) {
  state_ = State::name;
  source_ = spelled;
  name_.clear();
  named_ = known_ = false;
  keys_.clear();
}

/// What the block consists of: the content of a block that turns out to be no call.
void OutputParser::source(std::string_view text, Events& events) {
  if (!named_) {
    source_ += text;
  } else if (!known_ && !text.empty()) {
    content(text, events);
  }
}

void OutputParser::complete_name(Events& events) {
  if (named_) return;
  name_ = strip(name_);
  named_ = true;
  known_ = parsing_.tools->contains(name_);
  if (known_) {
    space_.clear();
    events.push_back({OutputKind::call_name, name_, calls_++});
  } else {
    content(std::exchange(source_, {}), events);
  }
}

void OutputParser::complete_key() {
  key_ = strip(key_);
  value_.clear();
}

void OutputParser::arguments(std::string text, Events& events) {
  events.push_back({OutputKind::call_arguments, std::move(text), calls_ - 1});
}

void OutputParser::begin_value(Events& events) {
  state_ = State::value;
  value_.clear();
  if (!known_) return;
  const bool first = keys_.empty();
  skip_ = !keys_.insert(key_).second;
  streamed_ = !skip_ && parsing_.tools->is_text(name_, key_);
  if (skip_) return;
  std::string opening = first ? "{\"" : ", \"";
  append_escaped(opening, key_);
  opening += "\": ";
  if (streamed_) {
    arguments(opening + '"', events);
  } else {
    source_ = std::move(opening);  // sent with the value
  }
}

void OutputParser::end_value(Events& events) {
  if (!known_ || skip_) return;
  if (streamed_) {
    arguments("\"", events);
  } else {
    arguments(std::exchange(source_, {}) + parsing_.tools->value(name_, key_, value_), events);
  }
}

void OutputParser::close_call(Events& events) {
  complete_name(events);
  if (state_ == State::value) end_value(events);
  state_ = State::content;
  if (!known_) return;
  arguments(keys_.empty() ? "{}" : "}", events);
  segment_open_ = true;
  drop_space_ = false;
  done_ = parsing_.single;
}

void OutputParser::call_tag(Tag tag, std::string_view spelled, Events& events) {
  if (tag == Tag::call) {
    close_call(events);
    if (!done_) open_call(spelled);
    return;
  }
  if (state_ == State::name && (tag == Tag::key || tag == Tag::call_end)) complete_name(events);
  source(spelled, events);
  const bool think = tag == Tag::think || tag == Tag::think_end;
  if (tag == Tag::call_end) {
    close_call(events);
  } else if (tag == Tag::key && state_ != State::key) {
    if (state_ == State::value) end_value(events);
    state_ = State::key;
    key_.clear();
  } else if (state_ == State::value) {
    if (tag == Tag::value_end) {
      end_value(events);
      state_ = State::after;
    } else if (think) {
      take(spelled, events);
    }
  } else if (tag == Tag::key_end && state_ == State::key) {
    complete_key();
    state_ = State::between;
  } else if (tag == Tag::value && (state_ == State::key || state_ == State::between)) {
    if (state_ == State::key) complete_key();
    begin_value(events);
  }
}

namespace {

constexpr std::array<std::string_view, 5> kSpelled = {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
                                                      "</tool_call>"};

/// Bytes at the end of the text that a tag may begin with.
size_t open_suffix(std::string_view text) {
  size_t longest = 0;
  for (const std::string_view tag : kSpelled) {
    for (size_t n = std::min(tag.size() - 1, text.size()); n > longest; --n) {
      if (text.ends_with(tag.substr(0, n))) longest = n;
    }
  }
  return longest;
}

}  // namespace

/// Text of its state, no tag in it.
void OutputParser::take(std::string_view text, Events& events) {
  if (state_ == State::name) {
    name_ += text;
  } else if (state_ == State::key) {
    key_ += text;
  } else if (state_ == State::value && known_ && !skip_) {
    if (streamed_) {
      std::string escaped;
      append_escaped(escaped, text);
      if (!escaped.empty()) arguments(std::move(escaped), events);
    } else {
      value_ += text;
    }
  }
}

void OutputParser::call_text(std::string_view fresh, Events& events) {
  std::string pending = std::exchange(held_, {}) + std::string(fresh);
  std::string_view rest = pending;
  while (!rest.empty() && !done_) {
    if (!in_call() || state_ == State::value) {
      if (state_ == State::value) source(rest, events);
      in_call() ? take(rest, events) : text(rest, events);
      return;
    }
    if (state_ == State::between && leading_space(rest) < rest.size()) {
      const size_t space = leading_space(rest);
      const std::string_view word = rest.substr(space);
      const bool tag = std::any_of(kSpelled.begin(), kSpelled.end(),
                                   [&](std::string_view t) { return word.starts_with(t) || t.starts_with(word); });
      if (!tag) {  // <arg_value> is missing
        source(rest.substr(0, space), events);
        begin_value(events);
        rest = word;
        continue;
      }
    }
    size_t at = std::string_view::npos;
    std::string_view tag_text;
    for (const std::string_view candidate : kSpelled) {
      const size_t found = rest.find(candidate);
      if (found < at) {
        at = found;
        tag_text = candidate;
      }
    }
    if (at == std::string_view::npos) {
      const size_t hold = open_suffix(rest);
      const std::string_view free = rest.substr(0, rest.size() - hold);
      source(free, events);
      take(free, events);
      held_ = rest.substr(free.size());
      return;
    }
    source(rest.substr(0, at), events);
    take(rest.substr(0, at), events);
    static constexpr std::array<Tag, 5> kTags = {Tag::key, Tag::key_end, Tag::value, Tag::value_end, Tag::call_end};
    const auto which = std::find(kSpelled.begin(), kSpelled.end(), tag_text) - kSpelled.begin();
    rest.remove_prefix(at + tag_text.size());
    call_tag(kTags.at(static_cast<size_t>(which)), tag_text, events);
  }
}

/// What was held back is text of its state after all.
void OutputParser::flush_held(Events& events) {
  if (held_.empty()) return;
  const std::string text = std::exchange(held_, {});
  if (state_ == State::between) {
    const size_t space = leading_space(text);
    source(std::string_view(text).substr(0, space), events);
    if (space == text.size()) return;
    begin_value(events);
    source(std::string_view(text).substr(space), events);
    take(std::string_view(text).substr(space), events);
    return;
  }
  source(text, events);
  take(text, events);
}

}  // namespace glm53::text
