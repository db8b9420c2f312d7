// JSON with limits: the one way to read what others sent.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace glm53 {

struct JsonLimits {
  size_t max_bytes = 256u << 20;
  int max_depth = 128;
  size_t max_values = 4u << 20;
  /// Integers beyond 64 bits become a binary value that holds their digits (engine/text prints them); else a double.
  bool keep_big_integers = false;
};
/// Throws Error(usage) with line and column for invalid JSON, invalid UTF-8, too deep, too large or with too many
/// values; lone surrogate escapes become U+FFFD. Members keep their order; of duplicate keys the last wins.
nlohmann::ordered_json parse_json(std::string_view text, const JsonLimits& limits = {});
/// One line, invalid UTF-8 replaced, never throws.
std::string dump(const nlohmann::ordered_json& value);

}  // namespace glm53
