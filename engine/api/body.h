// Request bodies as they were before their Content-Encoding.
#pragma once

#include <string>
#include <string_view>

namespace glm53::api {

/// Undoes `encoding` (gzip, x-gzip, deflate, identity or ""). Throws ApiError: 413 as soon as the result exceeds
/// `limit` bytes, 400 for a body that is not what it says, 415 for any other encoding.
std::string decode_body(std::string body, std::string_view encoding, size_t limit);

}  // namespace glm53::api
