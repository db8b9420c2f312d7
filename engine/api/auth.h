// API keys.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/http_server.h"

namespace glm53::api {

class KeyRing {
 public:
  /// No keys: everything is open.
  KeyRing() = default;
  /// Content of a key file: one key a line, optionally "name:key"; empty lines and lines that begin with # are skipped.
  /// Throws Error(config) when no key is in it.
  explicit KeyRing(std::string_view content);

  bool empty() const { return keys_.empty(); }
  /// Keys, for the log's filter.
  std::vector<std::string> secrets() const;
  /// Name of the key that an Authorization header carries; nullopt = refused. Compares with every key in constant time.
  std::optional<std::string> check(std::string_view authorization) const;

 private:
  struct Key {
    std::string name, secret;
  };
  std::vector<Key> keys_;
};

/// Paths that need no key: /health, /ready, /version, /ping, and /metrics when `metrics_open`.
bool is_open_path(std::string_view path, bool metrics_open);

}  // namespace glm53::api
