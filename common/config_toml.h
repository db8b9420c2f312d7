// TOML behind Config; toml++ stays in config_toml.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace glm53 {

/// One value of a TOML document.
struct TomlEntry {
  std::string key;               ///< dotted
  nlohmann::ordered_json value;  ///< null where JSON has no such type
  std::string found;             ///< its type in words, for errors
  unsigned line = 0;
};
/// Every leaf of the document, tables flattened. Throws Error(config) with "source:line" for broken TOML.
std::vector<TomlEntry> read_toml(std::string_view text, const std::string& source);

}  // namespace glm53
