// Holds JSON against the schemas of an OpenAPI document: the part of JSON Schema that our documents use.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/json.h"
#include "common/strings.h"

namespace glm53::test {

class OpenApi {
 public:
  using Json = nlohmann::ordered_json;
  /// `document` must outlive this.
  explicit OpenApi(const Json& document) : document_(document) {}

  /// "" when `value` is what `schema` says; else what is wrong, and where.
  std::string complaints(const Json& value, const Json& schema) const {
    std::vector<std::string> wrong;
    validate(value, schema, "", wrong);
    return join(wrong, "; ");
  }

 private:
  using Wrong = std::vector<std::string>;

  static bool is_type(const Json& value, const std::string& type) {
    if (type == "null") return value.is_null();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    return type == "array" ? value.is_array() : type == "object" && value.is_object();
  }

  void validate_object(const Json& value, const Json& schema, const std::string& where, Wrong& wrong) const {
    const Json properties = schema.value("properties", Json::object());
    for (const Json& name : schema.value("required", Json::array())) {
      if (!value.contains(name.get<std::string>()))
        wrong.push_back(cat(where, ".", name.get<std::string>(), " is missing"));
    }
    for (const auto& [key, member] : value.items()) {
      const auto known = properties.find(key);
      if (known != properties.end()) {
        validate(member, *known, cat(where, ".", key), wrong);
      } else if (const auto rest = schema.find("additionalProperties"); rest != schema.end()) {
        if (rest->is_object()) validate(member, *rest, cat(where, ".", key), wrong);
        if (rest->is_boolean() && !rest->get<bool>()) wrong.push_back(cat(where, ".", key, " is not described"));
      }
    }
  }

  void validate_any(const Json& value, const Json& choices, const std::string& where, Wrong& wrong) const {
    Wrong reasons;
    for (const Json& choice : choices) {
      Wrong of_this;
      validate(value, choice, where, of_this);
      if (of_this.empty()) return;
      reasons.insert(reasons.end(), of_this.begin(), of_this.end());
    }
    wrong.insert(wrong.end(), reasons.begin(), reasons.end());
  }

  void validate(const Json& value, const Json& schema, const std::string& where, Wrong& wrong) const {
    if (const auto it = schema.find("$ref"); it != schema.end()) {
      const std::string name = it->get<std::string>().substr(std::string("#/components/schemas/").size());
      return validate(value, document_["components"]["schemas"].at(name), where, wrong);
    }
    if (const auto it = schema.find("anyOf"); it != schema.end()) return validate_any(value, *it, where, wrong);
    if (const auto it = schema.find("type"); it != schema.end()) {
      const bool good = it->is_array()
                            ? std::any_of(it->begin(), it->end(), [&](const Json& t) { return is_type(value, t); })
                            : is_type(value, it->get<std::string>());
      if (!good) return wrong.push_back(cat(where, " is ", dump(value), ", not ", dump(*it)));
    }
    if (const auto it = schema.find("enum"); it != schema.end()) {
      if (std::find(it->begin(), it->end(), value) == it->end()) wrong.push_back(cat(where, " is ", dump(value)));
    }
    if (value.is_object()) validate_object(value, schema, where, wrong);
    if (value.is_array()) {
      if (value.size() < schema.value("minItems", size_t{0}) || value.size() > schema.value("maxItems", SIZE_MAX))
        wrong.push_back(cat(where, " has ", value.size(), " items"));
      for (const Json& item : value) validate(item, schema.value("items", Json::object()), where + "[]", wrong);
    }
  }

  const Json& document_;
};

}  // namespace glm53::test
