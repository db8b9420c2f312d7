// The recipe's variables (the .env file and the environment of its start.sh) as settings of ours, or why one is not
// needed. docs/from-the-recipe.md is made of the table.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::cli {

/// One variable. `key` names what it becomes; empty: nothing, and `note` says why.
struct Knob {
  std::string_view name, key, note;
  /// How the value changes on the way; nullptr: not at all. An empty answer: nothing is set.
  std::string (*convert)(const std::string&) = nullptr;
  bool secret = false;  ///< its value is never shown or written
};
std::span<const Knob> knobs();
/// nullptr for a name that the recipe does not have.
const Knob* find_knob(std::string_view name);

struct EnvLine {
  std::string name, value;
  int line = 0;
};
/// KEY=VALUE lines with comments, "export" and quotes; nothing is expanded or run. Throws Error(config) naming the line
/// of anything else.
std::vector<EnvLine> parse_env(std::string_view text, const std::string& file);

struct Import {
  std::string toml;                ///< a whole configuration file, checked
  std::vector<std::string> notes;  ///< what was left out, and what is to be done by hand
};
/// `role`: head or worker. Throws Error(config) naming the line of a value that cannot be.
Import import_recipe(std::string_view text, const std::string& file, const std::string& role);

/// "key=value" of each cluster setting that a recipe variable in the environment stands for, and its name.
struct Override {
  std::string setting, name;
};
std::vector<Override> recipe_overrides(const std::function<std::optional<std::string>(const char*)>& environment);

/// docs/from-the-recipe.md.
std::string recipe_page();

}  // namespace glm53::cli
