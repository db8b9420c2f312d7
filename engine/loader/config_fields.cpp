#include "engine/loader/config_fields.h"

#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

ConfigFields::ConfigFields(const nlohmann::json& object, std::string path, std::string kind)
    : object_(&object), path_(std::move(path)), kind_(std::move(kind)) {}

const nlohmann::json* ConfigFields::raw(std::string_view field) const {
  const auto it = object_->find(std::string(field));
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool ConfigFields::has(std::string_view field) const {
  return raw(field) != nullptr;
}

const nlohmann::json& ConfigFields::need(std::string_view field) const {
  const nlohmann::json* value = raw(field);
  if (value == nullptr)
    throw Error(Code::config, cat(path_, ".", field, " is missing"), cat("use the config.json of ", kind_));
  return *value;
}

std::string ConfigFields::shown(std::string_view field) const {
  constexpr size_t kLongest = 80;
  const nlohmann::json* value = raw(field);
  if (value == nullptr) return "missing";
  std::string text = value->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

void ConfigFields::refuse(std::string_view field, const std::string& found, const std::string& remedy) const {
  throw Error(Code::config, cat(path_, ".", field, " is ", found), remedy);
}

int64_t ConfigFields::integer(std::string_view field, int64_t low, int64_t high) const {
  const nlohmann::json& value = need(field);
  const bool integer = value.is_number_integer() &&
                       (!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  const int64_t found = integer ? value.get<int64_t>() : 0;
  if (!integer || found < low || found > high)
    refuse(field, shown(field), cat("expected an integer from ", low, " to ", high));
  return found;
}

int64_t ConfigFields::integer_or(std::string_view field, int64_t low, int64_t high, int64_t absent) const {
  return has(field) ? integer(field, low, high) : absent;
}

float ConfigFields::number_between(std::string_view field, double low, double high) const {
  const nlohmann::json& value = need(field);
  const double found = value.is_number() ? value.get<double>() : std::nan("");
  if (!(found > low && found < high))
    refuse(field, shown(field), cat("expected a number greater than ", low, " and less than ", high));
  return static_cast<float>(found);
}

bool ConfigFields::flag_or(std::string_view field, bool absent) const {
  const nlohmann::json* value = raw(field);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) refuse(field, shown(field), "expected true or false");
  return value->get<bool>();
}

std::string ConfigFields::text(std::string_view field) const {
  const nlohmann::json& value = need(field);
  if (!value.is_string()) refuse(field, shown(field), "expected a string");
  return value.get<std::string>();
}

std::vector<std::string> ConfigFields::texts(std::string_view field) const {
  const nlohmann::json& value = need(field);
  std::vector<std::string> out;
  if (!value.is_array()) refuse(field, shown(field), "expected a list of strings");
  for (const auto& item : value) {
    if (!item.is_string()) refuse(field, shown(field), "expected a list of strings");
    out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<int> ConfigFields::indices(std::string_view field) const {
  constexpr int kHighest = 1 << 30;
  const nlohmann::json& value = need(field);
  std::vector<int> out;
  if (!value.is_array()) refuse(field, shown(field), "expected a list of integers");
  for (const auto& item : value) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > kHighest)
      refuse(field, shown(field), "expected a list of integers from 0");
    out.push_back(item.get<int>());
  }
  return out;
}

ConfigFields ConfigFields::object(std::string_view field) const {
  const nlohmann::json& value = need(field);
  if (!value.is_object()) refuse(field, shown(field), "expected an object");
  return {value, cat(path_, ".", field)};
}

void ConfigFields::only_flag(std::string_view field, bool supported) const {
  if (flag_or(field, supported) != supported) refuse(field, shown(field), cat("only ", supported, " is supported"));
}

void ConfigFields::only_text(std::string_view field, std::string_view supported) const {
  if (has(field) && text(field) != supported) refuse(field, shown(field), cat("only \"", supported, "\" is supported"));
}

void ConfigFields::only_integer(std::string_view field, int64_t supported) const {
  const nlohmann::json* value = raw(field);
  if (value != nullptr && (!value->is_number_integer() || *value != supported))
    refuse(field, shown(field), cat("only ", supported, " is supported"));
}

}  // namespace glm53
