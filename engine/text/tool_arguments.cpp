#include "engine/text/tool_arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "engine/text/json_text.h"
#include "engine/text/utf8.h"

namespace glm53::text {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxRefs = 16;
constexpr unsigned kNull = 1, kInteger = 2, kNumber = 4, kBoolean = 8, kObject = 16, kArray = 32, kString = 64;

constexpr std::array<std::pair<std::string_view, unsigned>, 30> kTypes = {{
    {"null", kNull},        {"integer", kInteger}, {"int", kInteger},    {"int32", kInteger},  {"int64", kInteger},
    {"uint", kInteger},     {"uint32", kInteger},  {"uint64", kInteger}, {"long", kInteger},   {"short", kInteger},
    {"unsigned", kInteger}, {"number", kNumber},   {"float", kNumber},   {"float32", kNumber}, {"float64", kNumber},
    {"double", kNumber},    {"boolean", kBoolean}, {"bool", kBoolean},   {"object", kObject},  {"dict", kObject},
    {"array", kArray},      {"arr", kArray},       {"list", kArray},     {"sequence", kArray}, {"string", kString},
    {"str", kString},       {"text", kString},     {"varchar", kString}, {"char", kString},    {"enum", kString},
}};

unsigned type_named(const Json& name) {
  if (!name.is_string()) return 0;
  const auto& text = name.get_ref<const std::string&>();
  for (const auto& [known, type] : kTypes) {
    if (known == text) return type;
  }
  return 0;
}

unsigned type_of(const Json& value) {
  switch (value.type()) {
    case Json::value_t::object:
      return kObject;
    case Json::value_t::array:
      return kArray;
    case Json::value_t::string:
      return kString;
    case Json::value_t::boolean:
      return kBoolean;
    case Json::value_t::number_float:
      return kNumber;
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
    case Json::value_t::binary:  // the digits of a big one
      return kInteger;
    case Json::value_t::null:
    case Json::value_t::discarded:
      return kNull;
  }
  return 0;
}

const Json* member(const Json* object, std::string_view key) {
  if (object == nullptr || !object->is_object()) return nullptr;
  const auto found = object->find(std::string(key));
  return found == object->end() ? nullptr : &*found;
}

/// One function's schemas.
class Typing {
 public:
  explicit Typing(const Json* root) : root_(root) {}

  const Json* property(std::string_view key) const { return member(member(root_, "properties"), key); }

  /// The schema behind any $ref to a definition; null when there is none.
  const Json* target(const Json* schema) const {
    for (int i = 0; schema != nullptr; ++i) {
      const Json* ref = member(schema, "$ref");
      if (ref == nullptr || !ref->is_string()) return schema;
      if (i == kMaxRefs) return nullptr;
      schema = definition(ref->get_ref<const std::string&>());
    }
    return nullptr;
  }

  /// Never empty.
  unsigned types(const Json* schema) const {
    std::unordered_set<const Json*> seen;
    const unsigned found = collect(schema, seen);
    return found == 0 ? kString : found;
  }

  /// JSON text of `raw`, or nothing when no type fits. `nested`: inside an array or object.
  std::optional<std::string> typed(std::string_view raw, const Json* schema, bool nested) const {
    const unsigned types = this->types(schema);
    const std::string_view word = strip(raw);
    if ((types & kNull) != 0 && lower_is(raw, "null")) return "null";
    if ((types & kInteger) != 0) {
      if (auto integer = as_integer(word)) return integer;
    }
    if ((types & kNumber) != 0) {
      if (auto number = as_number(word, nested)) return number;
    }
    if ((types & kBoolean) != 0) {
      if (lower_is(word, "true") || word == "1") return "true";
      if (lower_is(word, "false") || word == "0") return "false";
    }
    if ((types & (kObject | kArray)) != 0) {
      if (auto json = as_json(raw, schema)) return json;
    }
    if ((types & kString) != 0) return quoted(raw);
    return std::nullopt;
  }

  std::optional<std::string> as_json(std::string_view raw, const Json* schema) const {
    try {
      const Json value = parse_json(raw, {.keep_big_integers = true});
      if (!value.is_structured()) return python_json(value);
      std::string out;
      append(out, value, schema);
      return out;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  static std::string quoted(std::string_view text) {
    std::string out = "\"";
    append_escaped(out, text);
    return out + '"';
  }

 private:
  const Json* definition(const std::string& ref) const {
    for (const std::string_view place : {"$defs", "definitions"}) {
      const std::string prefix = "#/" + std::string(place) + "/";
      if (!ref.starts_with(prefix)) continue;
      std::string name = ref.substr(prefix.size());
      for (const auto& [code, plain] : {std::pair("~1", "/"), std::pair("~0", "~")}) {
        for (size_t at = name.find(code); at != std::string::npos; at = name.find(code, at + 1)) {
          name.replace(at, 2, plain);
        }
      }
      return member(member(root_, place), name);
    }
    return nullptr;
  }

  unsigned collect(const Json* schema, std::unordered_set<const Json*>& seen) const {
    schema = target(schema);
    if (schema == nullptr || !schema->is_object() || !seen.insert(schema).second) return 0;
    unsigned found = 0;
    if (const Json* type = member(schema, "type")) {
      if (type->is_array()) {
        for (const Json& one : *type) found |= type_named(one);
      } else {
        found |= type_named(*type);
      }
    } else {
      if (member(schema, "properties") != nullptr) found |= kObject;
      if (member(schema, "items") != nullptr) found |= kArray;
    }
    if (const Json* values = member(schema, "enum"); values != nullptr && values->is_array()) {
      for (const Json& value : *values) found |= type_of(value);
    }
    if (const Json* value = member(schema, "const")) found |= type_of(*value);
    for (const char* name : {"anyOf", "oneOf", "allOf"}) {
      const Json* branches = member(schema, name);
      if (branches == nullptr || !branches->is_array()) continue;
      for (const Json& branch : *branches) found |= collect(&branch, seen);
    }
    return found;
  }

  void append(std::string& out, const Json& value, const Json* schema) const {
    schema = target(schema);
    if (value.is_object()) {
      const Json* properties = member(schema, "properties");
      out += '{';
      for (const auto& [key, inner] : value.items()) {
        if (&inner != &value.front()) out += ", ";
        out += quoted(key) + ": ";
        append(out, inner, member(properties, key));
      }
      out += '}';
    } else if (value.is_array()) {
      const Json* items = member(schema, "items");
      if (items != nullptr && !items->is_object()) items = nullptr;
      out += '[';
      for (const Json& inner : value) {
        if (&inner != &value.front()) out += ", ";
        append(out, inner, items);
      }
      out += ']';
    } else if (value.is_string() && schema != nullptr) {
      const auto& text = value.get_ref<const std::string&>();
      out += typed(text, schema, true).value_or(quoted(text));
    } else {
      append_json(out, value);
    }
  }

  static bool lower_is(std::string_view text, std::string_view word) {
    return std::equal(text.begin(), text.end(), word.begin(), word.end(),
                      [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + ('a' - 'A') : a) == b; });
  }

  static std::optional<std::string> as_integer(std::string_view word) {
    const bool negative = word.starts_with('-');
    if (negative || word.starts_with('+')) word.remove_prefix(1);
    if (word.empty() || word.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
    const size_t digits = word.find_first_not_of('0');
    if (digits == std::string_view::npos) return "0";
    return (negative ? "-" : "") + std::string(word.substr(digits));
  }

  static std::optional<std::string> as_number(std::string_view word, bool nested) {
    if (nested) {
      if (auto integer = as_integer(word)) return integer;
    }
    const bool negative = word.starts_with('-');
    if (negative || word.starts_with('+')) word.remove_prefix(1);
    if (!is_decimal(word)) return std::nullopt;
    double value = std::strtod(std::string(word).c_str(), nullptr);
    if (!std::isfinite(value)) return std::nullopt;
    if (negative) value = -value;
    constexpr double kExact = 9007199254740992.0;  // 2^53
    if (!nested && value == std::trunc(value) && std::fabs(value) < kExact) {
      return std::to_string(static_cast<int64_t>(value));
    }
    return python_float(value);
  }

  /// digits with at most one point and at least one digit, then an exponent if any.
  static bool is_decimal(std::string_view word) {
    size_t at = 0, digits = 0;
    const auto run = [&] {
      const size_t begin = at;
      while (at < word.size() && word[at] >= '0' && word[at] <= '9') ++at;
      return at - begin;
    };
    digits += run();
    if (at < word.size() && word[at] == '.') {
      ++at;
      digits += run();
    }
    if (digits == 0) return false;
    if (at < word.size() && (word[at] == 'e' || word[at] == 'E')) {
      ++at;
      if (at < word.size() && (word[at] == '+' || word[at] == '-')) ++at;
      if (run() == 0) return false;
    }
    return at == word.size();
  }

  const Json* root_;
};

}  // namespace

ToolSet::ToolSet(std::span<const Tool> tools) {
  for (const Tool& tool : tools) parameters_.emplace(tool.name, tool.parameters);
}

bool ToolSet::is_text(std::string_view name, std::string_view key) const {
  const auto found = parameters_.find(std::string(name));
  if (found == parameters_.end()) return true;
  const Typing typing(found->second.get());
  const Json* schema = typing.property(key);
  return schema == nullptr || typing.types(schema) == kString;
}

std::string ToolSet::value(std::string_view name, std::string_view key, std::string_view raw) const {
  const auto found = parameters_.find(std::string(name));
  if (found == parameters_.end()) return Typing::quoted(raw);
  const Typing typing(found->second.get());
  const Json* schema = typing.property(key);
  if (schema == nullptr) return Typing::quoted(raw);
  if (auto json = typing.typed(raw, schema, false)) return *json;
  if (auto json = typing.as_json(raw, schema)) return *json;
  return Typing::quoted(raw);
}

}  // namespace glm53::text
