// A conversation after normalisation: the one form the chat template renders, whatever dialect the client spoke.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/text/tokenizer.h"

namespace glm53::text {

enum class Role { system, user, assistant, tool };
enum class PartKind { text, image, video, audio };

struct ContentPart {
  PartKind kind = PartKind::text;
  std::string text;  ///< of text parts
};

struct Content {
  std::vector<ContentPart> parts;
  std::vector<std::string> tool_references;  ///< names; with `is_reference` the parts are not used
  bool is_reference = false;
};

/// A member of `arguments`, printed: strings as they are, everything else as JSON.
struct ToolArgument {
  std::string key, value;
};
struct ToolCall {
  std::optional<std::string> id;
  std::string name;
  std::vector<ToolArgument> arguments;
};
struct ToolResult {
  std::optional<std::string> id;
  Content content;
};

struct Message {
  Role role = Role::user;
  Content content;                       ///< of all roles but tool
  std::optional<std::string> reasoning;  ///< assistant; empty is not the same as absent
  std::vector<ToolCall> tool_calls;      ///< assistant
  std::vector<ToolResult> results;       ///< tool
};

struct Tool {
  std::string name;
  std::string line;                                          ///< the JSON object of the tools block
  bool deferred = false;                                     ///< declared later by a tool_reference
  bool strict = false;                                       ///< its calls must fit the schema
  std::shared_ptr<const nlohmann::ordered_json> parameters;  ///< JSON schema; null when none was given
};

/// OpenAI's `messages`. Throws Error(usage) that names the member ("messages[2].content: …").
std::vector<Message> parse_messages(const nlohmann::ordered_json& messages);
/// OpenAI's `tools`; null is none, an empty array an error. Throws Error(usage).
std::vector<Tool> parse_tools(const nlohmann::ordered_json& tools);
/// Number of image, video and audio parts.
struct MediaCount {
  int images = 0, videos = 0, audios = 0;
};
MediaCount count_media(const std::vector<Message>& messages);

/// What the template is told besides the conversation.
struct ChatOptions {
  std::optional<std::string> effort;
  bool thinking = true;
  bool clear_thinking = false;
  bool add_generation_prompt = true;
  bool continue_final_message = false;
};
/// Resolves the thinking switch and the effort from the members chat_template_kwargs, thinking and reasoning_effort
/// (null = absent). `always_think` ignores the switch as the stock template does. Throws Error(usage).
ChatOptions parse_options(const nlohmann::ordered_json& kwargs, const nlohmann::ordered_json& thinking,
                          const nlohmann::ordered_json& reasoning_effort, bool always_think);

}  // namespace glm53::text
