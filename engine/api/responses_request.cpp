// /v1/responses in the words of /v1/chat/completions.
#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "common/json.h"
#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/members.h"
#include "engine/api/request.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

constexpr auto kAccepted = Use::accepted;
constexpr auto kRefused = Use::refused;

/// Taken as they are: the same in both.
constexpr std::array<std::string_view, 25> kSame = {"model",
                                                    "temperature",
                                                    "top_p",
                                                    "top_k",
                                                    "min_p",
                                                    "presence_penalty",
                                                    "frequency_penalty",
                                                    "repetition_penalty",
                                                    "seed",
                                                    "stop",
                                                    "stop_token_ids",
                                                    "min_tokens",
                                                    "ignore_eos",
                                                    "logit_bias",
                                                    "bad_words",
                                                    "allowed_token_ids",
                                                    "stream",
                                                    "parallel_tool_calls",
                                                    "chat_template_kwargs",
                                                    "thinking_token_budget",
                                                    "priority",
                                                    "speculation",
                                                    "cache_salt",
                                                    "request_id",
                                                    "structured_outputs"};

constexpr std::array kMembers = {
    MemberRule{"input"},
    MemberRule{"instructions"},
    MemberRule{"tools"},
    MemberRule{"tool_choice"},
    MemberRule{"max_output_tokens"},
    MemberRule{"top_logprobs"},
    MemberRule{"reasoning"},
    MemberRule{"text"},
    MemberRule{"include"},
    MemberRule{"metadata"},
    MemberRule{"stream_options", kAccepted},
    MemberRule{"user", kAccepted},
    MemberRule{"service_tier", kAccepted},
    MemberRule{"prompt_cache_key", kAccepted},
    MemberRule{"prompt_cache_retention", kAccepted},
    MemberRule{"safety_identifier", kAccepted},
    MemberRule{"truncation", kRefused, "\"disabled\""},
    MemberRule{"store", kRefused, "false"},
    MemberRule{"background", kRefused, "false"},
    MemberRule{"previous_response_id", kRefused},
    MemberRule{"conversation", kRefused},
    MemberRule{"prompt", kRefused},
    MemberRule{"max_tool_calls", kRefused},
    MemberRule{"context_management", kRefused, "[]"},
};

/// The conversation from items; what belongs to one turn of the assistant is put together.
class Conversation {
 public:
  explicit Conversation(std::vector<std::string>& ignored) : ignored_(ignored) {}

  void add(const Json& item, const std::string& where) {
    if (!item.is_object()) Members::refuse(where, "must be an object");
    const Json& given = member_of(item, "type");
    const std::string type = given.is_null() ? "message" : need_text(item, "type", where);
    if (type == "message") {
      add_message(item, where);
    } else if (type == "reasoning") {
      add_reasoning(item, where);
    } else if (type == "function_call") {
      turn()["tool_calls"].push_back(
          {{"id", need_text(item, "call_id", where)},
           {"type", "function"},
           {"function", {{"name", need_text(item, "name", where)}, {"arguments", member_of(item, "arguments")}}}});
    } else if (type == "function_call_output") {
      flush();
      messages_.push_back({{"role", "tool"},
                           {"tool_call_id", need_text(item, "call_id", where)},
                           {"content", content(member_of(item, "output"), where + ".output")}});
    } else if (type == "item_reference") {
      Members::refuse(where, "items are not kept here, send them whole");
    } else {
      ignored_.push_back(cat("input.", type));  // agents send items of their own
    }
  }

  Json take() {
    flush();
    return std::move(messages_);
  }

  void say(const char* role, const Json& content) { messages_.push_back({{"role", role}, {"content", content}}); }

 private:
  Json& turn() {
    if (turn_.is_null()) turn_ = {{"role", "assistant"}, {"content", Json::array()}};
    return turn_;
  }

  void flush() {
    if (!turn_.is_null()) messages_.push_back(std::move(turn_));
    turn_ = nullptr;
  }

  static Json content(const Json& content, const std::string& where) {
    if (!content.is_array()) return content;
    for (size_t i = 0; i < content.size(); ++i) {
      if (content[i].is_object() && member_of(content[i], "type") == "input_file") {
        Members::refuse(cat(where, "[", i, "]"), "files are not supported");
      }
    }
    return content;
  }

  void add_message(const Json& item, const std::string& where) {
    const std::string role = need_text(item, "role", where);
    Json text = content(member_of(item, "content"), where + ".content");
    if (role != "assistant") {
      flush();
      messages_.push_back({{"role", role}, {"content", std::move(text)}});
      return;
    }
    if (!turn_.is_null() && turn_.contains("tool_calls")) flush();  // text behind calls is a turn of its own
    Json& parts = turn()["content"];
    if (text.is_array()) {
      for (Json& part : text) parts.push_back(std::move(part));
    } else if (!text.is_null()) {
      parts.push_back({{"type", "text"}, {"text", std::move(text)}});
    }
  }

  void add_reasoning(const Json& item, const std::string& where) {
    // A second thought behind words or calls begins the next turn.
    if (!turn_.is_null() && (turn_.contains("tool_calls") || !turn_["content"].empty())) flush();
    std::string text;
    for (const char* list : {"content", "summary"}) {
      const Json& parts = member_of(item, list);
      if (!parts.is_array()) continue;
      for (size_t i = 0; i < parts.size(); ++i) {
        const std::string at = cat(where, ".", list, "[", i, "]");
        if (!parts[i].is_object()) Members::refuse(at, "must be an object");
        text += need_text(parts[i], "text", at);
      }
      if (!text.empty()) break;
    }
    if (text.empty()) return;  // encrypted: not ours to read
    Json& message = turn();
    message["reasoning"] = message.contains("reasoning") ? message["reasoning"].get<std::string>() + text : text;
  }

  Json messages_ = Json::array();
  Json turn_;  ///< of the assistant, as far as it came; null = none
  std::vector<std::string>& ignored_;
};

Json chat_messages(const Members& members, std::vector<std::string>& ignored) {
  Conversation conversation(ignored);
  if (const auto text = members.text("instructions")) conversation.say("system", *text);
  const Json& input = members.get("input");
  if (input.is_string()) {
    conversation.say("user", input);
  } else if (input.is_array() && !input.empty()) {
    for (size_t i = 0; i < input.size(); ++i) conversation.add(input[i], cat("input[", i, "]"));
  } else {
    Members::refuse("input", "must be a string or an array of items that is not empty");
  }
  Json messages = conversation.take();
  if (messages.empty()) Members::refuse("input", "holds no message");
  return messages;
}

void add_tools(const Members& members, Json& out, std::vector<std::string>& ignored) {
  Json list = Json::array();
  const Json& tools = members.get("tools");
  if (!tools.is_null() && !tools.is_array()) Members::refuse("tools", "must be an array");
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string at = cat("tools[", i, "]");
    if (!tools[i].is_object()) Members::refuse(at, "must be an object");
    const std::string type = need_text(tools[i], "type", at);
    if (type != "function") {
      ignored.push_back(cat("tools.", type));
      continue;
    }
    Json function = tools[i];
    function.erase("type");
    list.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  const Json& choice = members.get("tool_choice");
  if (choice.is_object()) {
    if (member_of(choice, "type") != "function") Members::refuse("tool_choice", "only functions can be chosen");
    out["tool_choice"] = {{"type", "function"}, {"function", {{"name", need_text(choice, "name", "tool_choice")}}}};
  } else if (!choice.is_null() && !(list.empty() && (choice == "auto" || choice == "none"))) {
    out["tool_choice"] = choice;
  }
  if (!list.empty()) out["tools"] = std::move(list);
}

void add_text_format(const Json& text, Json& out) {
  if (text.is_null()) return;
  if (!text.is_object()) Members::refuse("text", "must be an object");
  const Json& format = member_of(text, "format");
  if (format.is_null()) return;
  if (!format.is_object()) Members::refuse("text.format", "must be an object");
  if (member_of(format, "type") != "json_schema") {
    out["response_format"] = format;
    return;
  }
  Json schema = format;
  schema.erase("type");
  out["response_format"] = {{"type", "json_schema"}, {"json_schema", std::move(schema)}};
}

void add_logprobs(const Members& members, Json& out) {
  bool wanted = members.given("top_logprobs");
  const Json& include = members.get("include");
  if (!include.is_null() && !include.is_array()) Members::refuse("include", "must be an array of strings");
  for (const Json& one : include) wanted = wanted || one == "message.output_text.logprobs";
  if (!wanted) return;
  out["logprobs"] = true;
  out["top_logprobs"] = members.get("top_logprobs");
}

std::string echo_of(const Members& members) {
  Json out;
  const auto as_given = [&](const char* name, Json fallback) {
    out[name] = members.given(name) ? members.get(name) : std::move(fallback);
  };
  as_given("instructions", nullptr);
  as_given("max_output_tokens", nullptr);
  as_given("metadata", Json::object());
  as_given("parallel_tool_calls", true);
  as_given("temperature", nullptr);
  as_given("text", {{"format", {{"type", "text"}}}});
  as_given("tool_choice", "auto");
  as_given("tools", Json::array());
  as_given("top_logprobs", 0);
  as_given("top_p", nullptr);
  as_given("user", nullptr);
  as_given("reasoning", {{"effort", nullptr}, {"summary", nullptr}});
  as_given("service_tier", nullptr);
  out["background"] = false;
  out["previous_response_id"] = nullptr;
  out["store"] = false;
  out["truncation"] = "disabled";
  return dump(out);
}

}  // namespace

Json chat_of_responses(const Json& body, std::vector<std::string>& ignored, std::string& echoed) {
  const Members members(body);
  if (members.given("previous_response_id") || members.given("conversation")) {
    throw ApiError(400, "responses are not kept: send the whole conversation as `input`",
                   members.given("conversation") ? "conversation" : "previous_response_id");
  }
  Json out = Json::object();
  for (std::string& name : members.check(kMembers)) {
    if (std::find(kSame.begin(), kSame.end(), name) == kSame.end()) {
      ignored.push_back(std::move(name));
    } else {
      out[name] = members.get(name);
    }
  }
  out["messages"] = chat_messages(members, ignored);
  add_tools(members, out, ignored);
  add_text_format(members.get("text"), out);
  add_logprobs(members, out);
  if (const Json& reasoning = members.get("reasoning"); !reasoning.is_null()) {
    if (!reasoning.is_object()) Members::refuse("reasoning", "must be an object");
    out["reasoning_effort"] = member_of(reasoning, "effort");
  }
  if (members.given("max_output_tokens")) {
    out["max_tokens"] = members.integer("max_output_tokens", 1, INT32_MAX).value_or(1);
  }
  echoed = echo_of(members);
  return out;
}

}  // namespace glm53::api
