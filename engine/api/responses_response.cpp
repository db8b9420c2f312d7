// Answers of /v1/responses: items, whole or as numbered events.
#include "engine/api/response.h"

#include "engine/api/errors.h"
#include "engine/api/response_common.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;
using text::OutputKind;

namespace {

class ResponsesFormat final : public ResponseFormat {
 public:
  ResponsesFormat(AnswerHead head, const text::Tokenizer& tokenizer)
      : head_(std::move(head)), echoed_(parse_json(head_.echoed_members)), tokenizer_(tokenizer) {}

  std::string whole(const std::vector<ChoiceAnswer>& choices, const Usage& usage) override {
    const ChoiceAnswer& answer = choices.front();
    cut_ = answer.finish_reason == "length";
    for (size_t i = 0; i < answer.parts.size(); ++i) {
      open(answer.parts[i]);
      part_ = answer.parts[i];
      output_.push_back(item(cut_ && i + 1 == answer.parts.size() ? "incomplete" : "completed"));
    }
    return dump(response(status(), &usage, {}));
  }

  std::string begin(int, const Usage&) override {
    const Json now = response("in_progress", nullptr, {});
    std::string out = send("response.created", {{"response", now}});
    return out + send("response.in_progress", {{"response", now}});
  }

  std::string event(int, const ChoiceEvent& event, const Usage*) override {
    std::string out;
    const bool call = event.kind == OutputKind::call_name;
    if (!open_ || call || (event.kind != OutputKind::call_arguments && event.kind != part_.kind)) {
      out = close("completed");
      open({event.kind, call ? event.text : "", event.call_id, {}, {}});
      Json added = item("in_progress");
      if (!call) added["content"] = Json::array();
      out += send("response.output_item.added", {{"output_index", output_.size()}, {"item", std::move(added)}});
      if (call) return out;
      out += send("response.content_part.added", place({{"part", content_part()}}));
    }
    Json scores = logprobs(event.scores);
    part_.scores.insert(part_.scores.end(), event.scores.begin(), event.scores.end());
    switch (event.kind) {
      case OutputKind::reasoning:
        part_.text += event.text;
        return out + send("response.reasoning_text.delta", place({{"delta", event.text}}));
      case OutputKind::call_arguments:
        part_.arguments += event.text;
        return out + send("response.function_call_arguments.delta",
                          {{"item_id", id_}, {"output_index", output_.size()}, {"delta", event.text}});
      default:
        part_.text += event.text;
        return out +
               send("response.output_text.delta", place({{"delta", event.text}, {"logprobs", std::move(scores)}}));
    }
  }

  std::string end(int, const ChoiceEvent&, const std::string& finish_reason, const StopReason&, const Usage*) override {
    cut_ = finish_reason == "length";
    return close(cut_ ? "incomplete" : "completed");
  }

  std::string last(const Usage& usage) override {
    return send(cut_ ? "response.incomplete" : "response.completed", {{"response", response(status(), &usage, {})}});
  }

  std::string failure(int status, std::string_view message) override {
    const Json error = {{"code", status == 429 ? "rate_limit_exceeded" : "server_error"}, {"message", message}};
    std::string out = close("incomplete");
    return out + send("response.failed", {{"response", response("failed", nullptr, error)}});
  }

 private:
  const char* status() const { return cut_ ? "incomplete" : "completed"; }

  std::string send(const char* name, Json members) {
    Json event = {{"type", name}, {"sequence_number", sequence_++}};
    event.update(members);
    return named_sse(name, event);
  }

  /// An event about the open item's one content part.
  Json place(Json members) const {
    Json out = {{"item_id", id_}, {"output_index", output_.size()}, {"content_index", 0}};
    out.update(members);
    return out;
  }

  void open(AnswerPart part) {
    part_ = std::move(part);
    open_ = true;
    const char* prefix = "msg_";
    if (part_.kind == OutputKind::reasoning) prefix = "rs_";
    if (part_.kind == OutputKind::call_name) prefix = "fc_";
    id_ = prefix + head_.id.substr(head_.id.find('_') + 1) + "_" + std::to_string(output_.size());
  }

  Json content_part() const {
    if (part_.kind == OutputKind::reasoning) return {{"type", "reasoning_text"}, {"text", part_.text}};
    return {{"type", "output_text"},
            {"text", part_.text},
            {"annotations", Json::array()},
            {"logprobs", logprobs(part_.scores)}};
  }

  Json item(const char* status) const {
    if (part_.kind == OutputKind::call_name) {
      return {{"type", "function_call"},      {"id", id_},       {"call_id", part_.call_id}, {"name", part_.text},
              {"arguments", part_.arguments}, {"status", status}};
    }
    Json content = Json::array({content_part()});
    if (part_.kind == OutputKind::reasoning) {
      return {{"type", "reasoning"},          {"id", id_},
              {"summary", Json::array()},     {"content", std::move(content)},
              {"encrypted_content", nullptr}, {"status", status}};
    }
    return {
        {"type", "message"}, {"id", id_}, {"role", "assistant"}, {"status", status}, {"content", std::move(content)}};
  }

  std::string close(const char* status) {
    if (!open_) return {};
    std::string out;
    if (part_.kind == OutputKind::call_name) {
      out = send(
          "response.function_call_arguments.done",
          {{"item_id", id_}, {"output_index", output_.size()}, {"name", part_.text}, {"arguments", part_.arguments}});
    } else if (part_.kind == OutputKind::reasoning) {
      out = send("response.reasoning_text.done", place({{"text", part_.text}}));
    } else {
      out = send("response.output_text.done", place({{"text", part_.text}, {"logprobs", logprobs(part_.scores)}}));
    }
    if (part_.kind != OutputKind::call_name) {
      out += send("response.content_part.done", place({{"part", content_part()}}));
    }
    Json done = item(status);
    out += send("response.output_item.done", {{"output_index", output_.size()}, {"item", done}});
    output_.push_back(std::move(done));
    open_ = false;
    return out;
  }

  Json logprobs(const std::vector<ScoredToken>& scores) const {
    Json list = Json::array();
    if (!head_.logprobs) return list;
    for (const ScoredToken& s : scores) {
      list.push_back(logprob_entry(tokenizer_, s, head_.top_logprobs, head_.tokens_as_ids));
    }
    return list;
  }

  Json response(const char* status, const Usage* usage, const Json& error) const {
    Json out = {{"id", head_.id}, {"object", "response"}, {"created_at", head_.created}, {"status", status}};
    out["error"] = error;
    out["incomplete_details"] =
        std::string_view(status) == "incomplete" ? Json({{"reason", "max_output_tokens"}}) : Json();
    out["model"] = head_.model;
    out["output"] = output_;
    if (usage != nullptr) {
      out["usage"] = {{"input_tokens", usage->prompt},
                      {"input_tokens_details", {{"cached_tokens", usage->cached}}},
                      {"output_tokens", usage->completion},
                      {"output_tokens_details", {{"reasoning_tokens", usage->reasoning}}},
                      {"total_tokens", usage->prompt + usage->completion}};
    } else {
      out["usage"] = nullptr;
    }
    out.update(echoed_);
    return out;
  }

  AnswerHead head_;
  const Json echoed_;
  const text::Tokenizer& tokenizer_;
  Json output_ = Json::array();  ///< items that are complete
  AnswerPart part_;              ///< the open item, as far as it came
  std::string id_;               ///< of the open item
  bool open_ = false, cut_ = false;
  int64_t sequence_ = 0;
};

}  // namespace

std::unique_ptr<ResponseFormat> responses_format(AnswerHead head, const text::Tokenizer& tokenizer) {
  return std::make_unique<ResponsesFormat>(std::move(head), tokenizer);
}

}  // namespace glm53::api
