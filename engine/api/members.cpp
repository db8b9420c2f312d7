#include "engine/api/members.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "common/json.h"
#include "common/strings.h"
#include "engine/api/errors.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

std::optional<int64_t> as_integer(const Json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double d = value.get<double>();
  if (d != std::floor(d) || std::fabs(d) > 9e15) return std::nullopt;
  return static_cast<int64_t>(d);
}

}  // namespace

Members::Members(const Json& object) : object_(object) {
  if (!object.is_object()) throw ApiError(400, "the request body must be a JSON object");
}

std::vector<std::string> Members::check(std::span<const MemberRule> rules) const {
  std::vector<std::string> unknown;
  for (const auto& [name, value] : object_.items()) {
    const auto rule = std::find_if(rules.begin(), rules.end(), [&](const MemberRule& r) { return r.name == name; });
    if (rule == rules.end()) {
      unknown.push_back(name);
    } else if (rule->use == Use::refused && !value.is_null() && dump(value) != rule->harmless) {
      refuse(name, "is not supported");
    }
  }
  return unknown;
}

const Json& Members::get(std::string_view name) const {
  static const Json null;
  const auto found = object_.find(std::string(name));
  return found == object_.end() ? null : *found;
}

bool Members::given(std::string_view name) const {
  return !get(name).is_null();
}

bool Members::boolean(std::string_view name, bool fallback) const {
  const Json& value = get(name);
  if (value.is_null()) return fallback;
  if (!value.is_boolean()) refuse(name, "must be true or false");
  return value.get<bool>();
}

std::optional<int64_t> Members::integer(std::string_view name, int64_t min, int64_t max) const {
  const Json& value = get(name);
  if (value.is_null()) return std::nullopt;
  const auto number = as_integer(value);
  if (!number) refuse(name, "must be an integer");
  if (*number < min || *number > max) {
    refuse(name, max == INT64_MAX ? cat("must be at least ", min, ", not ", *number)
                                  : cat("must be between ", min, " and ", max, ", not ", *number));
  }
  return number;
}

std::optional<double> Members::number(std::string_view name, double min, double max) const {
  const Json& value = get(name);
  if (value.is_null()) return std::nullopt;
  if (!value.is_number()) refuse(name, "must be a number");
  const double number = value.get<double>();
  if (!(number >= min && number <= max)) refuse(name, cat("must be between ", min, " and ", max, ", not ", number));
  return number;
}

std::optional<std::string> Members::text(std::string_view name) const {
  const Json& value = get(name);
  if (value.is_null()) return std::nullopt;
  if (!value.is_string()) refuse(name, "must be a string");
  return value.get<std::string>();
}

std::vector<int32_t> Members::integers(std::string_view name) const {
  const Json& value = get(name);
  std::vector<int32_t> out;
  if (value.is_null()) return out;
  if (!value.is_array()) refuse(name, "must be an array of token ids");
  for (const Json& element : value) {
    const auto number = as_integer(element);
    if (!number || *number < INT32_MIN || *number > INT32_MAX) refuse(name, "must be an array of token ids");
    out.push_back(static_cast<int32_t>(*number));
  }
  return out;
}

void Members::refuse(std::string_view name, std::string_view what) {
  throw ApiError(400, cat(name, ": ", what), std::string(name));
}

void Members::refuse_id(std::string_view name, int32_t id) {
  refuse(name, cat(id, " is no token of the vocabulary"));
}

const nlohmann::ordered_json& member_of(const nlohmann::ordered_json& object, const char* key) {
  static const nlohmann::ordered_json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string need_text(const nlohmann::ordered_json& object, const char* key, const std::string& where) {
  const nlohmann::ordered_json& value = member_of(object, key);
  if (!value.is_string()) Members::refuse(cat(where, ".", key), "must be a string");
  return value.get<std::string>();
}

}  // namespace glm53::api
