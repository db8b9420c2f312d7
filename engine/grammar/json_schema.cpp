// Which keywords there are, references, combinations; the types are in json_types.cpp.
#include "engine/grammar/json_schema.h"

#include <algorithm>
#include <array>
#include <set>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/text/json_text.h"

namespace glm53::grammar {

using Json = nlohmann::ordered_json;
using Id = Builder::Id;

namespace {

constexpr int kMaxDepth = 64;

constexpr std::array<std::string_view, 29> kEnforced = {"type",
                                                        "properties",
                                                        "required",
                                                        "additionalProperties",
                                                        "items",
                                                        "prefixItems",
                                                        "minItems",
                                                        "maxItems",
                                                        "enum",
                                                        "const",
                                                        "anyOf",
                                                        "oneOf",
                                                        "allOf",
                                                        "$ref",
                                                        "minimum",
                                                        "maximum",
                                                        "exclusiveMinimum",
                                                        "exclusiveMaximum",
                                                        "multipleOf",
                                                        "minLength",
                                                        "maxLength",
                                                        "pattern",
                                                        "format",
                                                        "minProperties",
                                                        "maxProperties",
                                                        "uniqueItems",
                                                        "nullable",
                                                        "$defs",
                                                        "definitions"};
constexpr std::array<std::string_view, 14> kAnnotations = {
    "title", "description", "default",  "examples",  "example",          "$comment", "$schema",
    "$id",   "deprecated",  "readOnly", "writeOnly", "contentMediaType", "$anchor",  "contentEncoding"};

template <size_t N>
bool one_of(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}
bool is_annotation(std::string_view key) {
  return one_of(kAnnotations, key) || key == "$defs" || key == "definitions" || key.starts_with("x-");
}

/// The type a keyword speaks of; schemas without `type` are read as of these types.
std::string_view type_of_keyword(std::string_view key) {
  static const std::map<std::string_view, std::string_view> types{
      {"properties", "object"},    {"required", "object"},         {"additionalProperties", "object"},
      {"minProperties", "object"}, {"maxProperties", "object"},    {"items", "array"},
      {"prefixItems", "array"},    {"minItems", "array"},          {"maxItems", "array"},
      {"uniqueItems", "array"},    {"minLength", "string"},        {"maxLength", "string"},
      {"pattern", "string"},       {"format", "string"},           {"minimum", "number"},
      {"maximum", "number"},       {"exclusiveMinimum", "number"}, {"exclusiveMaximum", "number"},
      {"multipleOf", "number"}};
  const auto found = types.find(key);
  return found == types.end() ? std::string_view() : found->second;
}

std::string type_name(const Json& value) {
  if (value.is_number_integer()) return "integer";
  if (value.is_number_float())
    return value.get<double>() ==
                   static_cast<double>(static_cast<int64_t>(std::clamp(value.get<double>(), -9e15, 9e15)))
               ? "integer"
               : "number";
  return value.is_binary() ? "integer" : value.type_name();
}

std::vector<std::string> types_of(const Json& schema, const std::string& path) {
  std::vector<std::string> out;
  const auto add = [&](const Json& name) {
    static constexpr std::array<std::string_view, 7> known = {"object",  "array",   "string", "number",
                                                              "integer", "boolean", "null"};
    if (!name.is_string() || !one_of(known, name.get_ref<const std::string&>()))
      JsonSchema::refuse(path, cat("type ", dump(name), " is none of JSON"));
    out.push_back(name.get<std::string>());
  };
  const auto type = schema.find("type");
  if (type != schema.end() && type->is_array()) {
    for (const Json& name : *type) add(name);
  } else if (type != schema.end()) {
    add(*type);
  } else {
    std::set<std::string> implied;
    for (const auto& [key, value] : schema.items())
      if (const auto name = type_of_keyword(key); !name.empty()) implied.emplace(name);
    out.assign(implied.begin(), implied.end());
  }
  const auto nullable = schema.find("nullable");
  if (nullable != schema.end() && *nullable == true && !out.empty()) out.emplace_back("null");
  return out;
}

bool fits(const std::vector<std::string>& types, const Json& value) {
  const std::string name = type_name(value);
  return types.empty() || std::any_of(types.begin(), types.end(), [&](const std::string& t) {
           return t == name || (t == "number" && name == "integer");
         });
}

size_t values_in(const Json& json) {
  size_t out = 1;
  if (json.is_structured())
    for (const auto& [key, value] : json.items()) out += values_in(value);
  return out;
}

}  // namespace

JsonSchema::JsonSchema(JsonText& text, const Json& root, std::string path)
    : t_(text), b_(text.builder()), root_(root), path_(std::move(path)), any_(std::make_unique<Json>(true)) {}

void JsonSchema::refuse(const std::string& path, const std::string& what) {
  throw Error(Code::usage, cat(path.empty() ? "schema" : path, ": ", what));
}

Id JsonSchema::root_value(bool bare) {
  return value(root_, path_, bare);
}

void JsonSchema::check_keywords(const Json& schema, const std::string& path) {
  for (const auto& [key, value] : schema.items()) {
    b_.budget().spend(1);
    if (one_of(kEnforced, key) || is_annotation(key)) continue;
    // Lists and schemas that say nothing.
    if ((key == "patternProperties" || key == "dependentRequired" || key == "dependentSchemas") && value.empty())
      continue;
    if ((key == "unevaluatedProperties" || key == "unevaluatedItems") && value == true) continue;
    refuse(path, cat("\"", key, "\" cannot be enforced"));
  }
  if (schema.value("uniqueItems", Json(false)) != false) refuse(path, "\"uniqueItems\" cannot be enforced");
}

const Json& JsonSchema::target(const std::string& reference, const std::string& path) const {
  if (!reference.starts_with('#'))
    refuse(path, cat("$ref \"", reference, "\": only references into the schema are known"));
  if (reference != "#" && !reference.starts_with("#/"))
    refuse(path, cat("$ref \"", reference, "\": anchors are not supported"));
  try {
    return root_.at(Json::json_pointer(reference.substr(1)));
  } catch (const Json::exception&) {
    refuse(path, cat("$ref \"", reference, "\" points nowhere"));
  }
}

Id JsonSchema::reference(const std::string& reference, const std::string& path, bool bare) {
  const Json& schema = target(reference, path);
  const auto [at, fresh] = references_.try_emplace({reference, bare}, 0);
  if (!fresh) return b_.call(at->second);
  const uint32_t rule = at->second = b_.rule(reference);
  // A rule of its own begins anew: recursion through references is no nesting.
  const int depth = std::exchange(depth_, 0);
  if (references_.size() > 2000) refuse(path, "more than 2000 references");
  if (++reference_depth_ > 200) refuse(path, "references nested more than 200 deep");
  b_.define(rule, value(schema, cat(path_, reference.substr(1)), bare));
  --reference_depth_;
  depth_ = depth;
  return b_.call(rule);
}

void JsonSchema::merge_member(Json& out, const std::string& key, const Json& value, const std::string& path) {
  const auto found = out.find(key);
  if (found == out.end() || is_annotation(key)) {
    out[key] = value;
  } else if (*found == value) {
  } else if (key == "properties" && found->is_object() && value.is_object()) {
    for (const auto& [name, schema] : value.items()) {
      const auto mine = found->find(name);
      (*found)[name] = mine == found->end() ? schema : Json{{"allOf", Json::array({*mine, schema})}};
    }
  } else if (key == "required" && found->is_array() && value.is_array()) {
    for (const Json& name : value)
      if (std::find(found->begin(), found->end(), name) == found->end()) found->push_back(name);
  } else if (key == "type") {
    Json kept = Json::array();
    const std::vector<std::string> a = types_of(Json{{"type", *found}}, path),
                                   b = types_of(Json{{"type", value}}, path);
    const auto in = [](const std::vector<std::string>& list, const char* name) {
      return std::find(list.begin(), list.end(), name) != list.end();
    };
    for (const std::string& type : a) {
      if (in(b, type.c_str()) || (type == "integer" && in(b, "number"))) kept.push_back(type);
      if (type == "number" && !in(b, "number") && in(b, "integer")) kept.push_back("integer");
    }
    if (kept.empty()) refuse(path, "no type satisfies all parts of allOf");
    *found = kept;
  } else if (key == "minimum" || key == "exclusiveMinimum" || key.starts_with("min")) {
    if (found->is_number() && value.is_number() && value > *found) *found = value;
  } else if (key == "maximum" || key == "exclusiveMaximum" || key.starts_with("max")) {
    if (found->is_number() && value.is_number() && value < *found) *found = value;
  } else {
    refuse(path, cat("two different \"", key, "\" in schemas that must both hold cannot be enforced"));
  }
}

Json JsonSchema::merge(const Json& a, const Json& b, const std::string& path) {
  b_.budget().spend(20 + 4 * (values_in(a) + values_in(b)));
  if (a == true) return b;
  if (b == true) return a;
  if (a == false || b == false) return false;
  if (!a.is_object() || !b.is_object()) refuse(path, "a schema must be an object, true or false");
  const auto closed = [](const Json& s) {
    return s.contains("additionalProperties") && s["additionalProperties"] != true;
  };
  // additionalProperties speaks of the properties beside it only.
  const auto names = [](const Json& s) {
    std::set<std::string> out;
    if (s.contains("properties") && s["properties"].is_object())
      for (const auto& [name, schema] : s["properties"].items()) out.insert(name);
    return out;
  };
  if ((closed(a) || closed(b)) && names(a) != names(b))
    refuse(path, "\"additionalProperties\" in one of several schemas that must all hold cannot be enforced");
  Json out = a;
  for (const auto& [key, value] : b.items()) {
    if (key == "anyOf" || key == "oneOf") {
      if (out.contains("anyOf") || out.contains("oneOf"))
        refuse(path, cat("several \"", key, "\" that must all hold cannot be enforced"));
      out[key] = value;
    } else {
      merge_member(out, key, value, path);
    }
  }
  return out;
}

Json JsonSchema::flat(const Json& schema, const std::string& path) {
  if (++depth_ > kMaxDepth) refuse(path, cat("nested more than ", kMaxDepth, " deep"));
  Json out = schema;
  if (out.is_object() && out.contains("$ref")) {
    if (!out["$ref"].is_string()) refuse(path, "\"$ref\" must be a string");
    const Json inner = flat(target(out["$ref"].get<std::string>(), path), path);
    out.erase("$ref");
    out = merge(inner, out, path);
  }
  if (out.is_object() && out.contains("allOf")) {
    const Json parts = out["allOf"];
    if (!parts.is_array() || parts.empty()) refuse(path, "\"allOf\" must be a list of schemas");
    out.erase("allOf");
    for (const Json& part : parts) out = merge(out, flat(part, path), path);
  }
  --depth_;
  return out;
}

Id JsonSchema::value(const Json& schema, const std::string& path, bool bare) {
  b_.budget().spend(10);
  if (schema == false) return b_.nothing();
  if (schema.is_object()) check_keywords(schema, path);
  const bool free =
      schema == true || (schema.is_object() && std::all_of(schema.items().begin(), schema.items().end(),
                                                           [](const auto& m) { return is_annotation(m.key()); }));
  if (free) return bare ? b_.repeat(characters(b_, CodeSet::all(), Writing::plain), 0, Builder::kUnbounded) : t_.any();
  if (!schema.is_object()) refuse(path, "a schema must be an object, true or false");
  if (++depth_ > kMaxDepth) refuse(path, cat("nested more than ", kMaxDepth, " deep"));
  Id out = 0;
  const bool alone = std::all_of(schema.items().begin(), schema.items().end(),
                                 [](const auto& m) { return m.key() == "$ref" || is_annotation(m.key()); });
  if (schema.contains("$ref") && alone) {
    if (!schema["$ref"].is_string()) refuse(path, "\"$ref\" must be a string");
    out = reference(schema["$ref"].get<std::string>(), path, bare);
  } else if (schema.contains("$ref") || schema.contains("allOf")) {
    out = value(flat(schema, path), path, bare);
  } else if (schema.contains("anyOf")) {
    out = branches(schema, "anyOf", path, bare);
  } else if (schema.contains("oneOf")) {
    out = branches(schema, "oneOf", path, bare);
  } else if (schema.contains("enum") || schema.contains("const")) {
    out = enumeration(schema, path, bare);
  } else {
    std::vector<std::string> types = types_of(schema, path);
    std::vector<Id> parts;
    for (const std::string& type : types) parts.push_back(typed(type, schema, path, bare));
    out = b_.alt(std::move(parts));
  }
  --depth_;
  return out;
}

/// One of several schemas, each together with what stands beside them.
Id JsonSchema::branches(const Json& schema, const std::string& key, const std::string& path, bool bare) {
  const Json& list = schema[key];
  if (!list.is_array() || list.empty()) refuse(path, cat("\"", key, "\" must be a list of schemas"));
  Json beside = schema;
  beside.erase(key);
  const bool bare_list =
      std::all_of(beside.items().begin(), beside.items().end(), [](const auto& m) { return is_annotation(m.key()); });
  if (key == "oneOf") require_disjoint(list, path);
  std::vector<Id> parts;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string inner = cat(path, "/", key, "/", i);
    parts.push_back(bare_list ? value(list[i], inner, bare)
                              : value(merge(beside, flat(list[i], inner), inner), inner, bare));
  }
  return b_.alt(std::move(parts));
}

/// oneOf is anyOf where no two branches can hold at once: by their types, their constants, or a constant member.
void JsonSchema::require_disjoint(const Json& list, const std::string& path) {
  std::vector<Json> all;
  for (const Json& one : list) all.push_back(flat(one, path));
  const auto constants = [](const Json& s) -> std::optional<std::set<std::string>> {
    if (!s.is_object()) return std::nullopt;
    if (s.contains("const")) return std::set<std::string>{dump(s["const"])};
    if (!s.contains("enum") || !s["enum"].is_array()) return std::nullopt;
    std::set<std::string> out;
    for (const Json& v : s["enum"]) out.insert(dump(v));
    return out;
  };
  const auto apart = [&](const auto& a, const auto& b) {
    return std::none_of(a.begin(), a.end(), [&](const auto& v) { return b.count(v) != 0; });
  };
  const auto types = [&](const Json& s) {
    std::set<std::string> out;
    if (!s.is_object()) return out;
    for (const std::string& t : types_of(s, path)) out.insert(t == "integer" ? "number" : t);
    if (s.contains("const")) out = {type_name(s["const"]) == "integer" ? "number" : type_name(s["const"])};
    return out;
  };
  const auto tagged = [&](const Json& a, const Json& b) {
    if (!a.contains("properties") || !b.contains("properties")) return false;
    for (const auto& [name, schema] : a["properties"].items()) {
      const auto has = [&, key = name](const Json& s) {
        const Json required = s.value("required", Json::array());
        return s["properties"].contains(key) && std::find(required.begin(), required.end(), key) != required.end();
      };
      if (!has(a) || !has(b)) continue;
      const auto x = constants(schema), y = constants(b["properties"][name]);
      if (x && y && apart(*x, *y)) return true;
    }
    return false;
  };
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      b_.budget().spend(50);
      if (all[i] == false || all[j] == false) continue;
      const auto a = types(all[i]), b = types(all[j]);
      if (!a.empty() && !b.empty() && apart(a, b)) continue;
      const auto x = constants(all[i]), y = constants(all[j]);
      if (x && y && apart(*x, *y)) continue;
      if (all[i].is_object() && all[j].is_object() && a == b && a.count("object") == 1 && tagged(all[i], all[j]))
        continue;
      refuse(path, cat("\"oneOf\": branches ", j, " and ", i, " may both hold; \"anyOf\" can be enforced"));
    }
  }
}

Id JsonSchema::enumeration(const Json& schema, const std::string& path, bool bare) {
  const std::vector<std::string> types = schema.contains("type") ? types_of(schema, path) : std::vector<std::string>{};
  for (const auto& [key, value] : schema.items()) {
    if (key != "enum" && key != "const" && key != "type" && key != "nullable" && !is_annotation(key))
      refuse(path, cat("\"", key, "\" beside \"enum\" or \"const\" cannot be enforced"));
  }
  Json list = schema.contains("const") ? Json::array({schema["const"]}) : schema["enum"];
  if (!list.is_array() || list.empty()) refuse(path, "\"enum\" must be a list of values");
  if (schema.contains("const") && schema.contains("enum")) {
    const Json& all = schema["enum"];
    if (!all.is_array() || std::find(all.begin(), all.end(), schema["const"]) == all.end())
      refuse(path, "no value is both \"const\" and in \"enum\"");
  }
  std::vector<std::string> texts;
  std::vector<Id> parts;
  for (const Json& one : list) {
    b_.budget().spend(1);
    if (!fits(types, one)) continue;
    if (one.is_structured() && !one.empty())
      parts.push_back(t_.constant(one));
    else
      texts.push_back(bare && one.is_string() ? one.get<std::string>() : text::python_json(one));
  }
  if (!texts.empty()) parts.push_back(b_.literals(std::move(texts)));
  if (parts.empty()) refuse(path, "no value of \"enum\" is of the \"type\"");
  return b_.alt(std::move(parts));
}

}  // namespace glm53::grammar
