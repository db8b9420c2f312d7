#include "engine/text/chat_messages.h"

#include <array>
#include <string_view>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/text/json_text.h"

namespace glm53::text {

namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void refuse(std::string_view where, std::string_view what) {
  throw Error(Code::usage, cat(where, ": ", what));
}

/// Member or null.
const Json& get(const Json& object, const char* key) {
  static const Json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string need_string(const Json& value, std::string_view where) {
  if (!value.is_string()) refuse(where, "must be a string");
  return value.get<std::string>();
}

std::optional<std::string> result_id(const Json& object) {
  for (const char* key : {"tool_call_id", "id"}) {
    const Json& id = get(object, key);
    if (truthy(id) && id.is_string()) return id.get<std::string>();
  }
  return std::nullopt;
}

/// nullopt: a part that prints nothing.
std::optional<ContentPart> parse_part(const Json& part, std::string_view where) {
  if (part.is_string()) return ContentPart{PartKind::text, part.get<std::string>()};
  if (!part.is_object()) refuse(where, "a content part must be an object or a string");
  const std::string type = need_string(get(part, "type"), cat(where, ".type"));
  if (type == "text" || type == "input_text" || type == "output_text") {
    return ContentPart{PartKind::text, need_string(get(part, "text"), cat(where, ".text"))};
  }
  if (type == "refusal") return ContentPart{PartKind::text, need_string(get(part, "refusal"), cat(where, ".refusal"))};
  if (type == "image" || type == "image_url" || type == "input_image") return ContentPart{PartKind::image, {}};
  if (type == "video" || type == "video_url" || type == "input_video") return ContentPart{PartKind::video, {}};
  if (type == "audio" || type == "audio_url" || type == "input_audio") return ContentPart{PartKind::audio, {}};
  return std::nullopt;
}

Content parse_content(const Json& content, const std::string& where) {
  Content out;
  if (content.is_null()) return out;
  if (content.is_string()) {
    out.parts.push_back({PartKind::text, content.get<std::string>()});
    return out;
  }
  if (!content.is_array()) refuse(where, "must be a string, an array of content parts, or null");
  if (!content.empty() && content[0].is_object() && get(content[0], "type") == "tool_reference") {
    out.is_reference = true;
    for (size_t i = 0; i < content.size(); ++i) {
      const std::string at = cat(where, "[", i, "]");
      if (!content[i].is_object()) refuse(at, "must be a tool_reference, as the first part is");
      out.tool_references.push_back(need_string(get(content[i], "name"), at + ".name"));
    }
    return out;
  }
  for (size_t i = 0; i < content.size(); ++i) {
    if (auto part = parse_part(content[i], cat(where, "[", i, "]"))) out.parts.push_back(std::move(*part));
  }
  return out;
}

std::vector<ToolArgument> object_arguments(const Json& object) {
  std::vector<ToolArgument> out;
  for (const auto& [key, value] : object.items()) {
    out.push_back({key, value.is_string() ? value.get<std::string>() : python_json(value)});
  }
  return out;
}

// A string that is no JSON object is never an error: histories hold what a model once wrote.
std::vector<ToolArgument> parse_arguments(const Json& arguments, const std::string& where) {
  if (arguments.is_null()) return {};
  if (arguments.is_object()) return object_arguments(arguments);
  if (!arguments.is_string()) refuse(where, "must be a string or an object");
  const auto& text = arguments.get_ref<const std::string&>();
  if (trim(text).empty()) return {};
  Json parsed;
  try {
    parsed = parse_json(text, {.keep_big_integers = true});
  } catch (const Error&) {
    return {{"arguments", text}};
  }
  if (parsed.is_null()) return {};
  if (!parsed.is_object()) return {{"arguments", text}};
  return object_arguments(parsed);
}

ToolCall parse_call(const Json& call, const std::string& where) {
  if (!call.is_object()) refuse(where, "must be an object");
  ToolCall out;
  if (const Json& id = get(call, "id"); truthy(id)) out.id = need_string(id, where + ".id");
  const Json& function = get(call, "function");
  const std::string at = function.is_null() ? where : where + ".function";
  const Json& body = function.is_null() ? call : function;
  if (!body.is_object()) refuse(at, "must be an object");
  out.name = need_string(get(body, "name"), at + ".name");
  out.arguments = parse_arguments(get(body, "arguments"), at + ".arguments");
  return out;
}

std::optional<std::string> parse_reasoning(const Json& message, const std::string& where) {
  for (const char* key : {"reasoning", "reasoning_content"}) {
    const Json& value = get(message, key);
    if (!value.is_null()) return need_string(value, cat(where, ".", key));
  }
  return std::nullopt;
}

void parse_assistant(const Json& message, const std::string& where, Message& out) {
  out.reasoning = parse_reasoning(message, where);
  const Json& calls = get(message, "tool_calls");
  if (!calls.is_null()) {
    if (!calls.is_array()) refuse(where + ".tool_calls", "must be an array");
    for (size_t i = 0; i < calls.size(); ++i) {
      out.tool_calls.push_back(parse_call(calls[i], cat(where, ".tool_calls[", i, "]")));
    }
  }
  const Json& legacy = get(message, "function_call");
  if (!legacy.is_null() && out.tool_calls.empty()) {
    out.tool_calls.push_back(parse_call(legacy, where + ".function_call"));
    out.tool_calls.back().id.reset();
  }
}

void parse_tool_message(const Json& message, const std::string& where, bool legacy, Message& out) {
  const Json& content = get(message, "content");
  const bool outputs =
      content.is_array() && !content.empty() && content[0].is_object() && content[0].contains("output");
  if (outputs) {
    for (size_t i = 0; i < content.size(); ++i) {
      const std::string at = cat(where, ".content[", i, "]");
      if (!content[i].is_object()) refuse(at, "must be an object with output, as the first element is");
      out.results.push_back({result_id(content[i]), parse_content(get(content[i], "output"), at + ".output")});
    }
    return;
  }
  std::optional<std::string> id = result_id(message);
  if (legacy && get(message, "name").is_string()) id = get(message, "name").get<std::string>();
  out.results.push_back({std::move(id), parse_content(content, where + ".content")});
}

Message parse_message(const Json& message, const std::string& where) {
  if (!message.is_object()) refuse(where, "must be an object");
  const std::string role = need_string(get(message, "role"), where + ".role");
  Message out;
  if (role == "tool" || role == "function") {
    out.role = Role::tool;
    parse_tool_message(message, where, role == "function", out);
    return out;
  }
  if (role == "system" || role == "developer") {
    out.role = Role::system;
  } else if (role == "user") {
    out.role = Role::user;
  } else if (role == "assistant") {
    out.role = Role::assistant;
    parse_assistant(message, where, out);
  } else {
    refuse(where + ".role", cat("unknown role \"", role, "\"; known are system, developer, user, assistant, tool"));
  }
  out.content = parse_content(get(message, "content"), where + ".content");
  return out;
}

Tool parse_tool(const Json& entry, const std::string& where) {
  if (!entry.is_object()) refuse(where, "must be an object");
  const Json& type = get(entry, "type");
  if (!type.is_null() && type != "function") refuse(where + ".type", "must be \"function\"");
  const bool nested = entry.contains("function");
  const Json& body = nested ? entry["function"] : entry;
  const std::string at = nested ? where + ".function" : where;
  if (!body.is_object()) refuse(at, "must be an object");
  Tool tool;
  tool.name = need_string(get(body, "name"), at + ".name");
  if (tool.name.empty()) refuse(at + ".name", "must not be empty");
  if (const Json& parameters = get(body, "parameters"); !parameters.is_null() && !parameters.is_object()) {
    refuse(at + ".parameters", "must be an object");
  } else if (parameters.is_object()) {
    tool.parameters = std::make_shared<const Json>(parameters);
  }
  tool.deferred = truthy(get(body, "defer_loading")) || truthy(get(entry, "defer_loading"));
  tool.strict = truthy(get(body, "strict")) || truthy(get(entry, "strict"));
  std::string& line = tool.line;
  line += '{';
  for (const auto& [key, value] : body.items()) {
    if (key == "defer_loading" || key == "strict") continue;
    if (line.size() > 1) line += ", ";
    line += '"';
    line += key;
    line += "\": ";
    append_json(line, value);
  }
  line += '}';
  return tool;
}

void check_effort(const std::string& effort) {
  static constexpr std::array<std::string_view, 7> kKnown = {"none", "minimal", "low", "medium",
                                                             "high", "xhigh",   "max"};
  for (const std::string_view known : kKnown) {
    if (effort == known) return;
  }
  refuse("reasoning_effort", "must be one of none, minimal, low, medium, high, xhigh, max");
}

}  // namespace

std::vector<Message> parse_messages(const Json& messages) {
  if (!messages.is_array()) refuse("messages", "must be an array");
  if (messages.empty()) refuse("messages", "must not be empty");
  std::vector<Message> out;
  out.reserve(messages.size());
  for (size_t i = 0; i < messages.size(); ++i) out.push_back(parse_message(messages[i], cat("messages[", i, "]")));
  return out;
}

std::vector<Tool> parse_tools(const Json& tools) {
  if (tools.is_null()) return {};
  if (!tools.is_array()) refuse("tools", "must be an array");
  if (tools.empty()) refuse("tools", "must not be empty; leave it out when there are none");
  std::vector<Tool> out;
  for (size_t i = 0; i < tools.size(); ++i) out.push_back(parse_tool(tools[i], cat("tools[", i, "]")));
  return out;
}

MediaCount count_media(const std::vector<Message>& messages) {
  MediaCount count;
  const auto add = [&count](const Content& content) {
    for (const ContentPart& part : content.parts) {
      count.images += part.kind == PartKind::image;
      count.videos += part.kind == PartKind::video;
      count.audios += part.kind == PartKind::audio;
    }
  };
  for (const Message& message : messages) {
    add(message.content);
    for (const ToolResult& result : message.results) add(result.content);
  }
  return count;
}

ChatOptions parse_options(const Json& kwargs, const Json& thinking, const Json& reasoning_effort, bool always_think) {
  ChatOptions options;
  if (!kwargs.is_null() && !kwargs.is_object()) refuse("chat_template_kwargs", "must be an object");
  if (!reasoning_effort.is_null()) {
    options.effort = need_string(reasoning_effort, "reasoning_effort");
    check_effort(*options.effort);
  }
  const bool effort_none = options.effort == "none";
  if (kwargs.is_object()) {
    if (const Json& effort = get(kwargs, "reasoning_effort"); !effort.is_null()) {
      options.effort = need_string(effort, "chat_template_kwargs.reasoning_effort");
    }
    options.clear_thinking = truthy(get(kwargs, "clear_thinking"));
  }
  const bool by_kwargs = kwargs.is_object() && (kwargs.contains("thinking") || kwargs.contains("enable_thinking"));
  if (by_kwargs) {
    options.thinking = truthy(get(kwargs, "thinking")) || truthy(get(kwargs, "enable_thinking"));
  }
  if (!thinking.is_null()) {
    const Json& type = thinking.is_object() ? get(thinking, "type") : thinking;
    if (type != "enabled" && type != "disabled") {
      refuse("thinking", "must be {\"type\": \"enabled\"} or {\"type\": \"disabled\"}");
    }
    if (!by_kwargs) options.thinking = type == "enabled";
  } else if (!by_kwargs && effort_none) {
    options.thinking = false;
  }
  if (always_think) options.thinking = true;
  return options;
}

}  // namespace glm53::text
