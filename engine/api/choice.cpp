#include "engine/api/choice.h"

#include <algorithm>

#include "common/digest.h"

namespace glm53::api {

using text::OutputKind;

Choice::Choice(const text::Tokenizer& tokenizer, ChoiceOptions options)
    : options_(std::move(options)),
      parser_(tokenizer, options_.start, options_.calls),
      raw_(tokenizer, options_.skip_special),
      matcher_(options_.stop, options_.include_stop) {}

// The token that ended it, whether or not the rank sends it along: no such token can stand anywhere else.
bool Choice::is_end(const wire::Delta& delta, size_t index) const {
  return delta.finish == "stop" && delta.stop_token >= 0 && index + 1 == delta.tokens.size() &&
         delta.tokens[index] == delta.stop_token;
}

void Choice::consume(const wire::Delta& delta, std::vector<ChoiceEvent>& events) {
  cached_tokens_ = std::max(cached_tokens_, delta.cached_tokens);
  drafted_ = std::max(drafted_, delta.draft_tokens);
  accepted_ = std::max(accepted_, delta.draft_accepted);
  for (size_t i = 0; i < delta.tokens.size() && !finished(); ++i) {
    const int32_t token = delta.tokens[i];
    ++completion_tokens_;
    if (options_.logprobs && i < delta.logprobs.size()) pending_.scores.push_back({token, delta.logprobs[i]});
    if (options_.token_ids) pending_.token_ids.push_back(token);
    if (is_end(delta, i)) break;
    feed(token, events);
  }
  if (!finished() && !delta.finish.empty()) end(delta, events);
}

void Choice::feed(int32_t token, std::vector<ChoiceEvent>& events) {
  if (!options_.parse) {
    std::string shown;
    raw_.push(token, shown);
    content(shown, events);
  } else {
    std::vector<text::OutputEvent> found;
    parser_.push(token, found);
    parsed(found, events);
  }
  if (!options_.stop.empty()) searched_.push_back(content_bytes_);
  if (!finished() && parser_.done()) {  // the only call there may be is complete
    finish_reason_ = stop_word();
    cut_ = static_cast<uint32_t>(completion_tokens_);
  }
}

void Choice::parsed(const std::vector<text::OutputEvent>& found, std::vector<ChoiceEvent>& events) {
  for (const text::OutputEvent& event : found) {
    if (event.kind == OutputKind::content) {
      content(event.text, events);
      continue;
    }
    if (finished()) return;  // a stop string before it
    if (event.kind != OutputKind::reasoning || options_.reasoning) {
      release(events);
      if (finished()) return;
      emit(event, events);
    }
  }
}

/// What ends without a limit ends so.
std::string Choice::stop_word() const {
  return parser_.calls() > 0 && !options_.named_call ? "tool_calls" : "stop";
}

/// Text held back for a stop string cannot continue behind something that is no content.
void Choice::release(std::vector<ChoiceEvent>& events) {
  std::string held;
  const auto match = matcher_.interrupt(held);
  emit({OutputKind::content, std::move(held), -1}, events);
  if (match) stopped(*match);
}

void Choice::content(const std::string& text, std::vector<ChoiceEvent>& events) {
  if (text.empty() || finished()) return;
  content_bytes_ += text.size();
  std::string shown;
  std::optional<text::StopMatcher::Match> match;
  if (completion_tokens_ < options_.min_tokens) {
    matcher_.pass(text, shown);
  } else {
    match = matcher_.push(text, shown);
  }
  emit({OutputKind::content, std::move(shown), -1}, events);
  if (match) stopped(*match);
}

void Choice::stopped(const text::StopMatcher::Match& match) {
  finish_reason_ = stop_word();
  stop_reason_ = matcher_.string(match.string);
  const size_t kept = match.begin + (options_.include_stop ? matcher_.string(match.string).size() : 0);
  const auto end = std::upper_bound(searched_.begin(), searched_.end(), kept);
  cut_ = static_cast<uint32_t>(end - searched_.begin());
}

void Choice::emit(const text::OutputEvent& found, std::vector<ChoiceEvent>& events) {
  if (found.text.empty()) return;
  const bool starts = events.empty() || events.back().kind != found.kind || events.back().call != found.call;
  if (starts) events.push_back({found.kind, {}, {}, {}, found.call});
  ChoiceEvent& event = events.back();
  if (found.kind == OutputKind::call_name) event.call_id = "call_" + random_hex(12);
  event.text += found.text;
  event.scores.insert(event.scores.end(), pending_.scores.begin(), pending_.scores.end());
  event.token_ids.insert(event.token_ids.end(), pending_.token_ids.begin(), pending_.token_ids.end());
  pending_ = {};
}

void Choice::end(const wire::Delta& delta, std::vector<ChoiceEvent>& events) {
  const bool by_token = delta.finish == "stop" && delta.stop_token >= 0;
  if (by_token) {
    if (delta.tokens.empty() || delta.tokens.back() != delta.stop_token) ++completion_tokens_;
    const bool requested =
        std::find(options_.stop_ids.begin(), options_.stop_ids.end(), delta.stop_token) != options_.stop_ids.end();
    if (requested && options_.include_stop) feed(delta.stop_token, events);
    if (delta.stop_token != options_.primary_eos || requested) stop_reason_ = delta.stop_token;
  }
  if (finished()) return;  // the text of the stop token completed a stop string, or its call
  std::string tail;
  if (options_.parse) {
    std::vector<text::OutputEvent> found;
    parser_.finish(delta.finish == "length", found);
    parsed(found, events);
  } else {
    raw_.finish(tail);
    content(tail, events);
  }
  std::string held;
  const auto match = finished() ? std::nullopt : matcher_.finish(held);
  emit({OutputKind::content, std::move(held), -1}, events);
  if (match) stopped(*match);
  cut_.reset();  // the rank has ended it already
  if (finish_reason_.empty()) finish_reason_ = delta.finish == "length" ? "length" : stop_word();
}

}  // namespace glm53::api
