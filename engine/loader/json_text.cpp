#include "engine/loader/json_text.h"

#include <nlohmann/json.hpp>

#include "common/strings.h"

namespace glm53 {

nlohmann::json parse_json_object(std::string_view text, const std::string& where, Code code) {
  constexpr int kMaxDepth = 16;
  const auto limit_depth = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kMaxDepth)
      throw Error(code, cat(where, ": JSON is nested deeper than ", kMaxDepth, " levels"), "the file is damaged");
    return true;
  };
  try {
    nlohmann::json value = nlohmann::json::parse(text.begin(), text.end(), limit_depth);
    if (!value.is_object()) throw Error(code, cat(where, ": JSON is a ", value.type_name(), ", expected an object"));
    return value;
  } catch (const nlohmann::json::exception& e) {
    throw Error(code, cat(where, ": invalid JSON: ", e.what()), "the file is damaged; download it again");
  }
}

}  // namespace glm53
