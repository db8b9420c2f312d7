// The public API as the commands find it: address and keys.
#pragma once

#include <string>
#include <vector>

#include "cli/admin_client.h"

namespace glm53::cli {

struct ApiTarget {
  std::string url, key_file;  ///< key_file "": the API asks for no key
};
/// What is "" in `given` is asked from the agent, but only when there is no url: then the file of keys stays as given.
/// Throws Error(unavailable) when no API process runs.
ApiTarget resolve_api(const GlobalOptions& global, ApiTarget given);
/// Keys of a file: "key" or "name:key" a line, '#' starts a comment. Throws Error(config) when there is none.
std::vector<std::string> read_api_keys(const std::string& file);
/// `error.message` of an API error body, or the body itself.
std::string api_error_message(const std::string& body);

}  // namespace glm53::cli
