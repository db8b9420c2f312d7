// Typed access to the members of one object of a config.json, with errors that name the field.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace glm53 {

/// A view of one JSON object; `path` ("config.json: text_config") begins every message.
class ConfigFields {
 public:
  /// `kind` names what the file should be of, for members that are missing.
  ConfigFields(const nlohmann::json& object, std::string path, std::string kind = "a glm5_next checkpoint");

  bool has(std::string_view field) const;  ///< present and not null
  /// Throws Error(config) when missing, not an integer, or outside [low, high].
  int64_t integer(std::string_view field, int64_t low, int64_t high) const;
  int64_t integer_or(std::string_view field, int64_t low, int64_t high, int64_t absent) const;
  int small(std::string_view field, int low, int high) const { return static_cast<int>(integer(field, low, high)); }
  /// Throws Error(config) when missing, not a number, or not low < value < high.
  float number_between(std::string_view field, double low, double high) const;
  bool flag_or(std::string_view field, bool absent) const;
  std::string text(std::string_view field) const;
  std::vector<std::string> texts(std::string_view field) const;
  std::vector<int> indices(std::string_view field) const;
  ConfigFields object(std::string_view field) const;

  /// Throws unless a field that may be absent holds the one value that is implemented.
  void only_flag(std::string_view field, bool supported) const;
  void only_text(std::string_view field, std::string_view supported) const;
  void only_integer(std::string_view field, int64_t supported) const;

  /// Throws Error(config, "path.field is found — remedy").
  [[noreturn]] void refuse(std::string_view field, const std::string& found, const std::string& remedy) const;
  /// What the field holds, as JSON, cut to a readable length.
  std::string shown(std::string_view field) const;
  const nlohmann::json* raw(std::string_view field) const;  ///< null when absent or null

 private:
  const nlohmann::json& need(std::string_view field) const;

  const nlohmann::json* object_;
  std::string path_, kind_;
};

}  // namespace glm53
