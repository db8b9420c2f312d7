// Arguments of tool calls: from the raw text of a value to JSON of the type that the tool's schema asks for.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include <nlohmann/json_fwd.hpp>

#include "engine/text/chat_messages.h"

namespace glm53::text {

/// The functions a request declares, by name. Immutable, shared by all choices of a request.
class ToolSet {
 public:
  ToolSet() = default;
  explicit ToolSet(std::span<const Tool> tools);
  bool empty() const { return parameters_.empty(); }
  bool contains(std::string_view name) const { return parameters_.find(std::string(name)) != parameters_.end(); }
  /// True when every value of the member is a string as it stands (so it can be sent as it arrives): its type set is
  /// {string}, or nothing is known about it.
  bool is_text(std::string_view name, std::string_view key) const;
  /// The value as JSON text, by the rules of typed arguments: null, integer, number, boolean, object or array, string,
  /// the first of the schema's types that fits; else any JSON; else a string. Never fails.
  std::string value(std::string_view name, std::string_view key, std::string_view raw) const;

 private:
  std::unordered_map<std::string, std::shared_ptr<const nlohmann::ordered_json>> parameters_;  ///< null: none
};

}  // namespace glm53::text
