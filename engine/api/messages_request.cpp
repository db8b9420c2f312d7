// Anthropic's /v1/messages in the words of /v1/chat/completions.
#include <array>

#include <nlohmann/json.hpp>

#include "common/strings.h"
#include "engine/api/members.h"
#include "engine/api/request.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

constexpr auto kAccepted = Use::accepted;
constexpr auto kRefused = Use::refused;

constexpr std::array kMembers = {
    MemberRule{"model"},
    MemberRule{"messages"},
    MemberRule{"max_tokens"},
    MemberRule{"system"},
    MemberRule{"tools"},
    MemberRule{"tool_choice"},
    MemberRule{"stop_sequences"},
    MemberRule{"temperature"},
    MemberRule{"top_p"},
    MemberRule{"top_k"},
    MemberRule{"stream"},
    MemberRule{"thinking"},
    MemberRule{"output_config"},
    MemberRule{"output_format"},
    MemberRule{"metadata", kAccepted},
    MemberRule{"service_tier", kAccepted},
    MemberRule{"cache_control", kAccepted},
    MemberRule{"inference_geo", kAccepted},
    MemberRule{"container", kRefused},
    MemberRule{"mcp_servers", kRefused, "[]"},
    MemberRule{"context_management", kRefused, "{\"edits\":[]}"},
};

std::string type_of(const Json& block, const std::string& where) {
  if (!block.is_object()) Members::refuse(where, "must be an object with a type");
  return need_text(block, "type", where);
}

[[noreturn]] void refuse_block(const std::string& type, const std::string& where) {
  Members::refuse(where, type == "image" ? "image blocks are not supported: this server has no vision"
                                         : cat("blocks of type ", type, " are not supported"));
}

Json text_part(std::string text) {
  return {{"type", "text"}, {"text", std::move(text)}};
}

/// A string, or text blocks, as content of a chat message.
Json text_content(const Json& content, const std::string& where) {
  if (content.is_null() || content.is_string()) return content;
  if (!content.is_array()) Members::refuse(where, "must be a string or an array of blocks");
  Json parts = Json::array();
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = cat(where, "[", i, "]");
    const std::string type = type_of(content[i], at);
    if (type == "tool_reference") {
      parts.push_back({{"type", type}, {"name", need_text(content[i], "tool_name", at)}});
    } else if (type == "text") {
      parts.push_back(text_part(need_text(content[i], "text", at)));
    } else {
      refuse_block(type, at);
    }
  }
  return parts;
}

/// Results of tools come first, then the user's own text.
void add_user(const Json& content, const std::string& where, Json& out) {
  if (!content.is_array()) {
    if (!content.is_string()) Members::refuse(where, "must be a string or an array of blocks");
    out.push_back({{"role", "user"}, {"content", content}});
    return;
  }
  Json parts = Json::array();
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = cat(where, "[", i, "]");
    const std::string type = type_of(content[i], at);
    if (type == "tool_result") {
      out.push_back({{"role", "tool"},
                     {"tool_call_id", need_text(content[i], "tool_use_id", at)},
                     {"content", text_content(member_of(content[i], "content"), at + ".content")}});
    } else if (type == "text") {
      parts.push_back(text_part(need_text(content[i], "text", at)));
    } else {
      refuse_block(type, at);
    }
  }
  if (!parts.empty()) out.push_back({{"role", "user"}, {"content", std::move(parts)}});
}

Json assistant_message(const Json& content, const std::string& where) {
  Json message = {{"role", "assistant"}};
  if (!content.is_array()) {
    if (!content.is_string()) Members::refuse(where, "must be a string or an array of blocks");
    message["content"] = content;
    return message;
  }
  Json parts = Json::array();
  std::optional<std::string> reasoning;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = cat(where, "[", i, "]");
    const Json& block = content[i];
    const std::string type = type_of(block, at);
    if (type == "text") {
      parts.push_back(text_part(need_text(block, "text", at)));
    } else if (type == "thinking") {
      reasoning = reasoning.value_or("") + need_text(block, "thinking", at);
    } else if (type == "tool_use") {
      const Json& input = member_of(block, "input");
      if (!input.is_object()) Members::refuse(at + ".input", "must be an object");
      message["tool_calls"].push_back({{"id", need_text(block, "id", at)},
                                       {"type", "function"},
                                       {"function", {{"name", need_text(block, "name", at)}, {"arguments", input}}}});
    } else if (type != "redacted_thinking") {
      refuse_block(type, at);
    }
  }
  message["content"] = std::move(parts);
  if (reasoning) message["reasoning"] = std::move(*reasoning);
  return message;
}

Json chat_messages(const Json& system, const Json& messages) {
  Json out = Json::array();
  if (!system.is_null()) out.push_back({{"role", "system"}, {"content", text_content(system, "system")}});
  if (!messages.is_array() || messages.empty()) Members::refuse("messages", "must be an array that is not empty");
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string at = cat("messages[", i, "]");
    if (!messages[i].is_object()) Members::refuse(at, "must be an object");
    const std::string role = need_text(messages[i], "role", at);
    const Json& content = member_of(messages[i], "content");
    if (role == "user") {
      add_user(content, at + ".content", out);
    } else if (role == "assistant") {
      out.push_back(assistant_message(content, at + ".content"));
    } else if (role == "system") {
      out.push_back({{"role", "system"}, {"content", text_content(content, at + ".content")}});
    } else {
      Members::refuse(at + ".role", "must be user or assistant");
    }
  }
  return out;
}

Json chat_tools(const Json& tools) {
  if (!tools.is_array()) Members::refuse("tools", "must be an array");
  Json out = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string at = cat("tools[", i, "]");
    const Json& tool = tools[i];
    if (!tool.is_object()) Members::refuse(at, "must be an object");
    if (const Json& type = member_of(tool, "type"); !type.is_null() && type != "custom") {
      Members::refuse(at + ".type", "only tools of the client are supported (custom)");
    }
    Json function = {{"name", need_text(tool, "name", at)}};
    for (const auto& [theirs, ours] : {std::pair("description", "description"), std::pair("input_schema", "parameters"),
                                       std::pair("strict", "strict"), std::pair("defer_loading", "defer_loading")}) {
      if (const Json& value = member_of(tool, theirs); !value.is_null()) function[ours] = value;
    }
    out.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return out;
}

void add_tool_choice(const Json& choice, Json& out) {
  if (choice.is_null()) return;
  const std::string type = type_of(choice, "tool_choice");
  if (type == "any") {
    out["tool_choice"] = "required";
  } else if (type == "tool") {
    out["tool_choice"] = {{"type", "function"}, {"function", {{"name", need_text(choice, "name", "tool_choice")}}}};
  } else if (type == "none") {
    out["tool_choice"] = "none";
  } else if (type != "auto") {
    Members::refuse("tool_choice.type", "must be auto, any, tool or none");
  }
  const Members members(choice);
  if (members.boolean("disable_parallel_tool_use", false)) out["parallel_tool_calls"] = false;
}

void add_thinking(const Json& thinking, Json& out) {
  if (thinking.is_null()) return;
  const std::string type = type_of(thinking, "thinking");
  if (type != "enabled" && type != "disabled" && type != "adaptive") {
    Members::refuse("thinking.type", "must be enabled, disabled or adaptive");
  }
  out["thinking"] = {{"type", type == "disabled" ? "disabled" : "enabled"}};
  if (type != "enabled") return;
  if (const auto budget = Members(thinking).integer("budget_tokens", 1, INT32_MAX)) {
    out["thinking_token_budget"] = *budget;
  }
}

/// output_config.format, or output_format as it was called first.
void add_output(const Members& members, Json& out) {
  const Json& config = members.get("output_config");
  const Json* format = &members.get("output_format");
  if (!config.is_null()) {
    if (!config.is_object()) Members::refuse("output_config", "must be an object");
    if (const Json& effort = member_of(config, "effort"); !effort.is_null()) out["reasoning_effort"] = effort;
    if (const Json& inner = member_of(config, "format"); !inner.is_null()) format = &inner;
  }
  if (format->is_null()) return;
  if (type_of(*format, "output_config.format") != "json_schema") {
    Members::refuse("output_config.format", "type must be json_schema");
  }
  out["response_format"] = {{"type", "json_schema"},
                            {"json_schema", {{"name", "output"}, {"schema", member_of(*format, "schema")}}}};
}

}  // namespace

Json chat_of_messages(const Json& body, bool counting, std::vector<std::string>& ignored) {
  const Members members(body);
  ignored = members.check(kMembers);
  Json out = Json::object();
  if (!counting && !members.given("max_tokens")) Members::refuse("max_tokens", "is missing");
  if (counting && members.given("max_tokens")) ignored.emplace_back("max_tokens");
  out["messages"] = chat_messages(members.get("system"), members.get("messages"));
  for (const char* same : {"model", "top_p", "top_k", "stream"}) {
    if (members.given(same)) out[same] = members.get(same);
  }
  if (!counting) out["max_tokens"] = members.get("max_tokens");
  if (const auto temperature = members.number("temperature", 0, 1)) out["temperature"] = *temperature;
  if (const Json& stop = members.get("stop_sequences"); !stop.is_null()) {
    if (!stop.is_array()) Members::refuse("stop_sequences", "must be an array of strings");
    out["stop"] = stop;
  }
  if (members.given("tools")) {
    if (Json tools = chat_tools(members.get("tools")); !tools.empty()) out["tools"] = std::move(tools);
  }
  add_tool_choice(members.get("tool_choice"), out);
  add_thinking(members.get("thinking"), out);
  add_output(members, out);
  // A conversation that ends with the assistant's words is gone on with in its turn.
  const Json& end = out["messages"].back();
  if (end["role"] == "assistant") {
    if (end.contains("tool_calls")) Members::refuse("messages", "the tool_use blocks at the end have no tool_result");
    out["add_generation_prompt"] = false;
    out["continue_final_message"] = true;
  }
  return out;
}

}  // namespace glm53::api
