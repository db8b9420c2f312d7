#include "engine/api/generation.h"

#include <algorithm>

#include "common/log.h"
#include "common/strings.h"
#include "engine/api/errors.h"

namespace glm53::api {

namespace {

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

void add_part(ChoiceAnswer& answer, const ChoiceEvent& event) {
  if (event.kind == text::OutputKind::call_arguments) {
    answer.parts.back().arguments += event.text;
    return;
  }
  const bool starts =
      answer.parts.empty() || answer.parts.back().kind != event.kind || event.kind == text::OutputKind::call_name;
  if (starts) answer.parts.push_back({event.kind, {}, event.call_id, {}, {}});
  AnswerPart& part = answer.parts.back();
  part.text += event.text;
  part.scores.insert(part.scores.end(), event.scores.begin(), event.scores.end());
}

void add_text(ChoiceAnswer& answer, ChoiceEvent& event) {
  if (!event.text.empty()) add_part(answer, event);
  switch (event.kind) {
    case text::OutputKind::reasoning:
      answer.reasoning += event.text;
      break;
    case text::OutputKind::content:
      answer.content += event.text;
      break;
    case text::OutputKind::call_name:
      answer.calls.push_back({std::move(event.call_id), std::move(event.text), {}});
      break;
    case text::OutputKind::call_arguments:
      answer.calls.back().arguments += event.text;
      break;
  }
}

}  // namespace

Generation::Generation(const text::Tokenizer& tokenizer, EngineLink& link, Metrics& metrics,
                       std::unique_ptr<ResponseFormat> format, GenerationOptions options,
                       std::shared_ptr<HttpReply> reply)
    : link_(link),
      metrics_(metrics),
      options_(std::move(options)),
      reply_(std::move(reply)),
      format_(std::move(format)) {
  for (size_t p = 0; p < options_.prompt_tokens.size(); ++p) {
    ChoiceOptions choice = options_.choice;
    choice.start = options_.starts[p];
    for (int k = 0; k < options_.n; ++k) slots_.push_back({Choice(tokenizer, choice), {}});
  }
}

void Generation::set_first_id(uint64_t first_id) {
  const std::scoped_lock lock(mutex_);
  first_id_ = first_id;
}

void Generation::watch_client() {
  reply_->on_disconnect([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->abandon();
  });
}

void Generation::on_delta(const wire::Delta& delta) {
  std::vector<Cancelled> cancelled;
  try {
    const std::scoped_lock lock(mutex_);
    if (done_) return;
    try {
      take(delta, cancelled);
    } catch (const std::exception& e) {
      log::error(cat("an answer could not be built: ", e.what()));
      fail(500, "internal error; the server's log says more", cancelled);
    }
  } catch (const std::exception& e) {
    log::error(cat("an answer could not be ended: ", e.what()));
  }
  cancel(cancelled);
}

// With mutex_ held, like everything below but cancel().
void Generation::take(const wire::Delta& delta, std::vector<Cancelled>& cancelled) {
  const size_t index = static_cast<size_t>(delta.id - first_id_);
  if (index >= slots_.size() || slots_[index].ended) return;
  const auto now = Clock::now();
  if (!first_token_) {
    metrics_.first_token(seconds(now - begin_));
    metrics_.queued(delta.queue_ms / 1000.0);
    queue_ms_ = delta.queue_ms;
    first_at_ = now;
  }
  metrics_.next_tokens(first_token_ ? seconds(now - last_token_) : -1, delta.tokens.size());
  first_token_ = true;
  last_token_ = now;

  Slot& slot = slots_[index];
  std::vector<ChoiceEvent> events;
  slot.choice.consume(delta, events);
  if (slot.choice.finished()) {
    slot.ended = true;
    metrics_.finished(slot.choice.finish_reason(), slot.choice.completion_tokens());
    if (slot.choice.cut()) cancelled.push_back({delta.id, slot.choice.cut()});
  }
  if (options_.stream) {
    if (!write(stream_events(index, events))) {
      end_all("abort", cancelled);
      return;
    }
  } else {
    collect(slot, events);
  }
  if (std::all_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.ended; })) finish();
}

std::string Generation::stream_events(size_t index, std::vector<ChoiceEvent>& events) {
  Slot& slot = slots_[index];
  const int number = static_cast<int>(index);
  std::string out;
  if (!slot.begun) out += format_->begin(number, usage());
  slot.begun = true;
  Usage running;
  if (options_.continuous_usage) running = usage();
  const Usage* shown = options_.continuous_usage ? &running : nullptr;
  for (const ChoiceEvent& event : events) out += format_->event(number, event, shown);
  if (slot.ended) {
    out += format_->end(number, slot.choice.take_rest(), slot.choice.finish_reason(), slot.choice.stop_reason(), shown);
  }
  return out;
}

void Generation::collect(Slot& slot, std::vector<ChoiceEvent>& events) {
  ChoiceAnswer& answer = slot.answer;
  if (slot.ended) {
    events.push_back(slot.choice.take_rest());
    answer.finish_reason = slot.choice.finish_reason();
    answer.stop_reason = slot.choice.stop_reason();
  }
  for (ChoiceEvent& event : events) {
    add_text(answer, event);
    answer.scores.insert(answer.scores.end(), event.scores.begin(), event.scores.end());
    answer.token_ids.insert(answer.token_ids.end(), event.token_ids.begin(), event.token_ids.end());
  }
}

void Generation::start_stream() {
  if (streaming_) return;
  streaming_ = true;
  auto headers = options_.headers;
  headers.emplace_back("Cache-Control", "no-cache");
  headers.emplace_back("X-Accel-Buffering", "no");
  reply_->start_stream(200, "text/event-stream; charset=utf-8", std::move(headers));
}

bool Generation::write(std::string chunk) {
  if (chunk.empty()) return true;
  start_stream();
  last_write_ = Clock::now();
  return reply_->write(std::move(chunk));
}

Usage Generation::usage() const {
  Usage u;
  for (const int64_t tokens : options_.prompt_tokens) u.prompt += tokens;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Choice& choice = slots_[i].choice;
    u.completion += choice.completion_tokens();
    u.drafted += choice.drafted();
    u.accepted += choice.accepted();
    u.reasoning += options_.choice.parse ? choice.reasoning_tokens() : 0;
    // The first choice of a prompt tells what was cached before this request.
    if (i % static_cast<size_t>(options_.n) == 0) u.cached += choice.cached_tokens();
  }
  return u;
}

void Generation::finish() {
  done_ = true;
  metrics_.answered(seconds(Clock::now() - begin_));
  account(slots_.front().choice.finish_reason());
  if (options_.stream) {
    if (write(format_->last(usage()))) reply_->finish();
    return;
  }
  std::vector<ChoiceAnswer> answers;
  for (Slot& slot : slots_) answers.push_back(std::move(slot.answer));
  HttpResponse response;
  response.headers = options_.headers;
  response.body = format_->whole(answers, usage());
  reply_->send(std::move(response));
}

/// Tells the key's quota what was used, and the log the request's times, in milliseconds since it came, as one line for
/// machines. Nothing of what was said is in it.
void Generation::account(std::string_view finish) const {
  const Usage u = usage();
  if (options_.lease) options_.lease->end(u.prompt + u.completion);
  if (options_.log_id.empty()) return;
  const auto since = [this](Clock::time_point t) { return static_cast<int64_t>(seconds(t - begin_) * 1000); };
  log::info(cat("request {\"id\":\"", options_.log_id, "\",\"key\":\"", options_.log_key, "\",\"finish\":\"", finish,
                "\",\"prompt_tokens\":", u.prompt, ",\"cached_tokens\":", u.cached,
                ",\"completion_tokens\":", u.completion, ",\"draft_tokens\":", u.drafted,
                ",\"draft_accepted\":", u.accepted, ",\"choices\":", slots_.size(), ",\"queue_ms\":", queue_ms_,
                ",\"first_token_ms\":", first_token_ ? since(first_at_) : -1, ",\"total_ms\":", since(Clock::now()),
                "}"));
}

void Generation::end_all(std::string_view reason, std::vector<Cancelled>& cancelled) {
  done_ = true;
  account(reason);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].ended) continue;
    slots_[i].ended = true;
    cancelled.push_back({first_id_ + i, std::nullopt});
    metrics_.finished(reason, slots_[i].choice.completion_tokens());
  }
}

void Generation::fail(int status, const std::string& message, std::vector<Cancelled>& cancelled,
                      uint32_t retry_after_s) {
  if (done_) return;
  end_all("error", cancelled);
  if (!streaming_) {
    HttpResponse response = error_response(status, message, {}, retry_after_s, options_.dialect);
    response.headers.insert(response.headers.end(), options_.headers.begin(), options_.headers.end());
    reply_->send(std::move(response));
    return;
  }
  if (write(format_->failure(status, message))) reply_->finish();
}

void Generation::on_failure(uint64_t, int status, const std::string& message, uint32_t retry_after_s) {
  std::vector<Cancelled> cancelled;
  {
    const std::scoped_lock lock(mutex_);
    fail(status, message, cancelled, retry_after_s);
  }
  cancel(cancelled);
}

void Generation::abandon() {
  std::vector<Cancelled> cancelled;
  {
    const std::scoped_lock lock(mutex_);
    if (done_) return;
    end_all("abort", cancelled);
  }
  cancel(cancelled);
}

bool Generation::keep_alive(std::chrono::milliseconds limit) {
  std::vector<Cancelled> cancelled;
  {
    const std::scoped_lock lock(mutex_);
    if (done_) return false;
    if (Clock::now() - last_write_ < limit) return true;
    if (!write(format_->keep_alive())) end_all("abort", cancelled);
  }
  cancel(cancelled);
  return true;
}

void Generation::cancel(const std::vector<Cancelled>& cancelled) {
  for (const Cancelled& c : cancelled) link_.cancel(c.id, c.keep);
}

}  // namespace glm53::api
