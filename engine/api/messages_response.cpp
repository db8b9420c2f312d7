// Answers of /v1/messages: content blocks, whole or as named events.
#include "common/error.h"
#include "engine/api/errors.h"
#include "engine/api/response.h"
#include "engine/api/response_common.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;
using text::OutputKind;

namespace {

/// The client's ids of calls begin with toolu_.
std::string use_id(const std::string& call_id) {
  constexpr std::string_view kOurs = "call_";
  return "toolu_" + (call_id.starts_with(kOurs) ? call_id.substr(kOurs.size()) : call_id);
}

/// What a limit cut is no JSON: the call is there without its input, and stop_reason says why.
Json input_of(const std::string& arguments) {
  try {
    return parse_json(arguments);
  } catch (const Error&) {
    return Json::object();
  }
}

Json usage_of(const Usage& u) {
  return {{"input_tokens", u.prompt - u.cached},
          {"output_tokens", u.completion},
          {"cache_read_input_tokens", u.cached},
          {"cache_creation_input_tokens", 0}};
}

class MessagesFormat final : public ResponseFormat {
 public:
  explicit MessagesFormat(AnswerHead head) : head_(std::move(head)) {}

  std::string whole(const std::vector<ChoiceAnswer>& choices, const Usage& usage) override {
    const ChoiceAnswer& answer = choices.front();
    Json content = Json::array();
    for (const AnswerPart& part : answer.parts) {
      called_ = called_ || part.kind == OutputKind::call_name;
      content.push_back(block(part.kind, part.text, part.call_id, input_of(part.arguments)));
    }
    end_of(answer.finish_reason, answer.stop_reason);
    return dump(message(std::move(content), stop_reason_, stop_sequence_, usage));
  }

  std::string begin(int, const Usage& now) override {
    return named_sse("message_start",
                     {{"type", "message_start"}, {"message", message(Json::array(), nullptr, nullptr, now)}});
  }

  std::string event(int, const ChoiceEvent& event, const Usage*) override {
    std::string out;
    const bool starts = !open_ || event.kind == OutputKind::call_name ||
                        (event.kind != OutputKind::call_arguments && event.kind != *open_);
    if (starts) {
      out = close();
      open_ = event.kind;
      const bool call = event.kind == OutputKind::call_name;
      called_ = called_ || call;
      out += named_sse("content_block_start",
                       {{"type", "content_block_start"},
                        {"index", index_},
                        {"content_block", block(event.kind, call ? event.text : "", event.call_id, Json::object())}});
      if (call) return out;
    }
    switch (event.kind) {
      case OutputKind::reasoning:
        return out + delta({{"type", "thinking_delta"}, {"thinking", event.text}});
      case OutputKind::call_arguments:
        return out + delta({{"type", "input_json_delta"}, {"partial_json", event.text}});
      default:
        return out + delta({{"type", "text_delta"}, {"text", event.text}});
    }
  }

  std::string end(int, const ChoiceEvent&, const std::string& finish_reason, const StopReason& reason,
                  const Usage*) override {
    end_of(finish_reason, reason);
    return close();
  }

  std::string last(const Usage& usage) override {
    return named_sse("message_delta", {{"type", "message_delta"},
                                       {"delta", {{"stop_reason", stop_reason_}, {"stop_sequence", stop_sequence_}}},
                                       {"usage", usage_of(usage)}}) +
           named_sse("message_stop", {{"type", "message_stop"}});
  }

  std::string failure(int status, std::string_view message) override {
    return "event: error\ndata: " + error_body(status, message, {}, Dialect::anthropic) + "\n\n";
  }

  std::string keep_alive() override { return named_sse("ping", {{"type", "ping"}}); }

 private:
  static Json block(OutputKind kind, const std::string& text, const std::string& call_id, Json input) {
    switch (kind) {
      case OutputKind::reasoning:
        return {{"type", "thinking"}, {"thinking", text}, {"signature", ""}};
      case OutputKind::call_name:
        return {{"type", "tool_use"}, {"id", use_id(call_id)}, {"name", text}, {"input", std::move(input)}};
      default:
        return {{"type", "text"}, {"text", text}};
    }
  }

  Json message(Json content, const Json& stop_reason, const Json& stop_sequence, const Usage& usage) const {
    return {{"id", head_.id},
            {"type", "message"},
            {"role", "assistant"},
            {"model", head_.model},
            {"content", std::move(content)},
            {"stop_reason", stop_reason},
            {"stop_sequence", stop_sequence},
            {"usage", usage_of(usage)}};
  }

  std::string delta(Json inner) const {
    return named_sse("content_block_delta",
                     {{"type", "content_block_delta"}, {"index", index_}, {"delta", std::move(inner)}});
  }

  std::string close() {
    if (!open_) return {};
    std::string out;
    if (open_ == OutputKind::reasoning) out = delta({{"type", "signature_delta"}, {"signature", ""}});
    out += named_sse("content_block_stop", {{"type", "content_block_stop"}, {"index", index_}});
    open_.reset();
    ++index_;
    return out;
  }

  /// tool_use only with a block of that kind in the answer.
  void end_of(const std::string& finish_reason, const StopReason& reason) {
    if (finish_reason == "length") {
      stop_reason_ = "max_tokens";
    } else if (called_) {
      stop_reason_ = "tool_use";
    } else if (const auto* text = std::get_if<std::string>(&reason)) {
      stop_reason_ = "stop_sequence";
      stop_sequence_ = *text;
    } else {
      stop_reason_ = "end_turn";
    }
  }

  AnswerHead head_;
  int index_ = 0;
  std::optional<OutputKind> open_;  ///< kind of the open block
  bool called_ = false;
  Json stop_reason_, stop_sequence_;
};

}  // namespace

std::unique_ptr<ResponseFormat> messages_format(AnswerHead head) {
  return std::make_unique<MessagesFormat>(std::move(head));
}

}  // namespace glm53::api
