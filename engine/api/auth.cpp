#include "engine/api/auth.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::api {

namespace {

bool is_bearer(std::string_view scheme) {
  static constexpr std::string_view kBearer = "bearer";
  return std::equal(scheme.begin(), scheme.end(), kBearer.begin(), kBearer.end(),
                    [](char a, char b) { return (a | 0x20) == b; });
}

}  // namespace

KeyRing::KeyRing(std::string_view content) {
  for (const std::string& line : split(content, '\n')) {
    const std::string_view text = trim(line);
    if (text.empty() || text[0] == '#') continue;
    const size_t colon = text.find(':');
    Key key;
    if (colon == std::string_view::npos) {
      key = {cat("key", keys_.size() + 1), std::string(text)};
    } else {
      key = {std::string(trim(text.substr(0, colon))), std::string(trim(text.substr(colon + 1)))};
    }
    if (key.secret.empty()) throw Error(Code::config, cat("API key file: key '", key.name, "' is empty"));
    keys_.push_back(std::move(key));
  }
  if (keys_.empty()) {
    throw Error(Code::config, "API key file: there is no key in it",
                "write one key a line, or leave api.key_file empty");
  }
}

std::vector<std::string> KeyRing::secrets() const {
  std::vector<std::string> out;
  for (const Key& key : keys_) out.push_back(key.secret);
  return out;
}

std::optional<std::string> KeyRing::check(std::string_view authorization) const {
  const std::string_view header = trim(authorization);
  const size_t space = header.find(' ');
  if (space == std::string_view::npos || !is_bearer(header.substr(0, space))) return std::nullopt;
  const std::string_view secret = trim(header.substr(space));
  std::optional<std::string> found;
  for (const Key& key : keys_) {
    // No early end: the time must not tell which key matched.
    if (equal_constant_time(key.secret, secret)) found = key.name;
  }
  return found;
}

bool is_open_path(std::string_view path, bool metrics_open) {
  if (path == "/metrics") return metrics_open;
  return path == "/health" || path == "/ready" || path == "/version" || path == "/ping";
}

}  // namespace glm53::api
