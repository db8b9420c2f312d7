#include <cmath>

#include "engine/api/errors.h"
#include "engine/api/response.h"
#include "engine/api/response_common.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;
using text::OutputKind;

std::string token_text(const text::Tokenizer& tokenizer, int32_t token, bool as_id) {
  if (as_id) return "token_id:" + std::to_string(token);
  return tokenizer.decode(std::span(&token, 1));
}

double printable_logprob(float logprob) {
  return std::isnan(logprob) || logprob < -9999.0f ? -9999.0 : static_cast<double>(logprob);
}

std::string ResponseFormat::failure(int status, std::string_view message) {
  return "data: " + error_body(status, message) + "\n\n" + std::string(kDone);
}

namespace {

Json token_entry(const text::Tokenizer& tokenizer, int32_t token, float logprob, bool as_id) {
  Json bytes = Json::array();
  for (const char c : tokenizer.bytes(token)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token_text(tokenizer, token, as_id)},
          {"logprob", printable_logprob(logprob)},
          {"bytes", std::move(bytes)}};
}

}  // namespace

Json logprob_entry(const text::Tokenizer& tokenizer, const ScoredToken& scored, int32_t top, bool as_id) {
  Json entry = token_entry(tokenizer, scored.token, scored.score.logprob, as_id);
  Json list = Json::array();
  for (const auto& [id, logprob] : scored.score.top) {
    if (static_cast<int32_t>(list.size()) >= top) break;
    list.push_back(token_entry(tokenizer, id, logprob, as_id));
  }
  entry["top_logprobs"] = std::move(list);
  return entry;
}

namespace {

class ChatFormat final : public ResponseFormat {
 public:
  ChatFormat(AnswerHead head, const text::Tokenizer& tokenizer) : head_(std::move(head)), tokenizer_(tokenizer) {}

  std::string whole(const std::vector<ChoiceAnswer>& choices, const Usage& usage) override {
    Json list = Json::array();
    for (size_t i = 0; i < choices.size(); ++i) list.push_back(choice(static_cast<int>(i), choices[i]));
    Json body;
    body["id"] = head_.id;
    body["object"] = "chat.completion";
    body["created"] = head_.created;
    body["model"] = head_.model;
    body["choices"] = std::move(list);
    body["service_tier"] = nullptr;
    body["system_fingerprint"] = nullptr;
    body["usage"] = usage_json(usage);
    body["prompt_logprobs"] = nullptr;
    body["prompt_token_ids"] = head_.token_ids && !head_.prompts.empty() ? Json(head_.prompts.front()) : Json();
    body["kv_transfer_params"] = nullptr;
    return dump(body);
  }

  std::string begin(int index, const Usage&) override {
    std::string first = sse(chunk(index, {{"role", "assistant"}, {"content", ""}}, nullptr));
    if (!echo(index).empty()) first += sse(chunk(index, {{"content", echo(index)}}, nullptr));
    return first;
  }

  std::string event(int index, const ChoiceEvent& event, const Usage* running) override {
    Json out = chunk(index, delta(event), running);
    add_tokens(out["choices"][0], event);
    return sse(out);
  }

  std::string end(int index, const ChoiceEvent& rest, const std::string& finish_reason, const StopReason& reason,
                  const Usage* running) override {
    Json out = chunk(index, Json::object(), running);
    Json& choice = out["choices"][0];
    add_tokens(choice, rest);
    choice["finish_reason"] = finish_reason;
    choice["stop_reason"] = stop_reason_json(reason);
    return sse(out);
  }

  std::string last(const Usage& usage) override {
    if (!head_.include_usage) return std::string(kDone);
    Json out = head();
    out["choices"] = Json::array();
    out["usage"] = usage_json(usage);
    return sse(out) + std::string(kDone);
  }

 private:
  static Json delta(const ChoiceEvent& event) {
    Json call;
    switch (event.kind) {
      case OutputKind::reasoning:
        return {{"reasoning_content", event.text}, {"reasoning", event.text}};
      case OutputKind::content:
        return {{"content", event.text}};
      case OutputKind::call_name:
        call = {{"index", event.call},
                {"id", event.call_id},
                {"type", "function"},
                {"function", {{"name", event.text}, {"arguments", ""}}}};
        break;
      case OutputKind::call_arguments:
        call = {{"index", event.call}, {"function", {{"arguments", event.text}}}};
        break;
    }
    return {{"tool_calls", Json::array({std::move(call)})}};
  }

  const std::string& echo(int index) const {
    static const std::string none;
    const auto i = static_cast<size_t>(index);
    return i < head_.echo.size() ? head_.echo[i] : none;
  }

  Json head() const {
    return {{"id", head_.id}, {"object", "chat.completion.chunk"}, {"created", head_.created}, {"model", head_.model}};
  }

  Json chunk(int index, Json delta, const Usage* running) const {
    Json out = head();
    Json choice;
    choice["index"] = index;
    choice["delta"] = std::move(delta);
    choice["logprobs"] = nullptr;
    choice["finish_reason"] = nullptr;
    out["choices"] = Json::array({std::move(choice)});
    if (running != nullptr) {
      out["usage"] = usage_json(*running);
    } else if (head_.include_usage) {
      out["usage"] = nullptr;
    }
    return out;
  }

  void add_tokens(Json& choice, const ChoiceEvent& event) const {
    if (head_.logprobs && !event.scores.empty()) choice["logprobs"] = logprobs(event.scores);
    if (head_.token_ids) choice["token_ids"] = event.token_ids;
  }

  Json logprobs(const std::vector<ScoredToken>& scores) const {
    Json content = Json::array();
    for (const ScoredToken& s : scores) {
      content.push_back(logprob_entry(tokenizer_, s, head_.top_logprobs, head_.tokens_as_ids));
    }
    return {{"content", std::move(content)}};
  }

  Json choice(int index, const ChoiceAnswer& answer) const {
    const std::string content = echo(index) + answer.content;
    Json message;
    message["role"] = "assistant";
    message["content"] = string_or_null(content);
    message["refusal"] = nullptr;
    message["annotations"] = nullptr;
    message["audio"] = nullptr;
    message["function_call"] = nullptr;
    message["reasoning"] = string_or_null(answer.reasoning);
    message["reasoning_content"] = string_or_null(answer.reasoning);
    for (const ToolCallAnswer& call : answer.calls) {
      message["tool_calls"].push_back(
          {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
    }
    Json out;
    out["index"] = index;
    out["message"] = std::move(message);
    out["logprobs"] = head_.logprobs ? logprobs(answer.scores) : Json();
    out["finish_reason"] = answer.finish_reason;
    out["stop_reason"] = stop_reason_json(answer.stop_reason);
    out["token_ids"] = head_.token_ids ? Json(answer.token_ids) : Json();
    return out;
  }

  AnswerHead head_;
  const text::Tokenizer& tokenizer_;
};

}  // namespace

std::unique_ptr<ResponseFormat> chat_format(AnswerHead head, const text::Tokenizer& tokenizer) {
  return std::make_unique<ChatFormat>(std::move(head), tokenizer);
}

}  // namespace glm53::api
