// JSON as the chat template prints it: Python's json.dumps(value, ensure_ascii=False).
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace glm53::text {

/// Appends `value`: separators ", " and ": ", members in order, non-ASCII and "/" as they are, control characters as \n
/// \t \r \b \f or \u00xx, floating-point numbers by shortest round-trip repr ("1.0", "1e-07").
void append_json(std::string& out, const nlohmann::ordered_json& value);
std::string python_json(const nlohmann::ordered_json& value);
/// Python's repr of a finite double.
std::string python_float(double value);
/// Appends the escaped characters of a JSON string, without the quotes.
void append_escaped(std::string& out, std::string_view text);

/// Python's bool(value) of a decoded JSON value.
bool truthy(const nlohmann::ordered_json& value);

}  // namespace glm53::text
