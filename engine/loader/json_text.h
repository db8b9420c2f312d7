// JSON of checkpoint files. Other than common/json.h it stays fast on an object of 150 000 members (a real index).
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "common/error.h"

namespace glm53 {

/// Parses a JSON object. Throws Error(code) naming `where` and the byte for anything else, or for more than 16 levels.
nlohmann::json parse_json_object(std::string_view text, const std::string& where, Code code);

}  // namespace glm53
