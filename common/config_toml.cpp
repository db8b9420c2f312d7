#include "common/config_toml.h"

#include <sstream>

#include <toml++/toml.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

namespace {

using Json = nlohmann::ordered_json;

Json to_json(const toml::node& node) {
  if (const auto* v = node.as_string()) return v->get();
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  if (const auto* v = node.as_boolean()) return v->get();
  if (const auto* array = node.as_array()) {
    Json out = Json::array();
    for (const auto& element : *array) out.push_back(to_json(element));
    return out;
  }
  return nullptr;
}

std::string in_words(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return "text";
    case toml::node_type::integer:
      return "an integer";
    case toml::node_type::floating_point:
      return "a number with a fraction";
    case toml::node_type::boolean:
      return "true or false";
    case toml::node_type::array:
      return "an array";
    case toml::node_type::table:
      return "a table";
    default:
      return "a date or time";
  }
}

void flatten(const toml::table& table, const std::string& prefix, std::vector<TomlEntry>& out) {
  for (const auto& [name, node] : table) {
    const std::string key = cat(prefix, std::string_view(name.str()));
    const toml::table* inner = node.as_table();
    if (inner != nullptr && !inner->empty()) {
      flatten(*inner, key + ".", out);
    } else if (inner == nullptr) {
      out.push_back({key, to_json(node), in_words(node), static_cast<unsigned>(node.source().begin.line)});
    }
  }
}

}  // namespace

std::vector<TomlEntry> read_toml(std::string_view text, const std::string& source) {
  try {
    std::vector<TomlEntry> entries;
    const toml::table table = toml::parse(text, std::string_view(source));
    flatten(table, "", entries);
    return entries;
  } catch (const toml::parse_error& e) {
    throw Error(Code::config,
                cat(source, ":", static_cast<unsigned>(e.source().begin.line), ": invalid TOML: ", e.description()));
  }
}

}  // namespace glm53
