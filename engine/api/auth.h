// API keys.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/http_server.h"
#include "engine/api/quota.h"

namespace glm53::api {

class KeyRing {
 public:
  /// No keys: everything is open.
  KeyRing() = default;
  /// Content of a key file: one key a line, optionally "name:key", optionally with limits behind it
  /// (requests_per_minute=, concurrent=, tokens_per_minute=, tokens_per_day=); empty lines and lines that begin with #
  /// are skipped. Throws Error(config) when no key is in it, for a limit that is none, and for a name that comes twice.
  explicit KeyRing(std::string_view content);

  bool empty() const { return keys_.empty(); }
  /// Keys, for the log's filter.
  std::vector<std::string> secrets() const;
  /// Name of the key that an Authorization header carries; nullopt = refused. Compares with every key in constant time.
  std::optional<std::string> check(std::string_view authorization) const;
  /// The same for a key alone, as in an x-api-key header.
  std::optional<std::string> check_secret(std::string_view secret) const;
  /// Of the key of that name.
  KeyLimits limits(std::string_view name) const;

 private:
  struct Key {
    std::string name, secret;
    KeyLimits limits;
  };
  std::vector<Key> keys_;
};

/// The keys in force; follows their file. Thread-safe.
class KeyStore {
 public:
  /// `path`: where `ring` came from; "" = nowhere.
  KeyStore(KeyRing ring, std::string path);
  std::shared_ptr<const KeyRing> ring() const;
  /// Reads the file again if it is another than last time. A file that cannot be used leaves the keys as they are; the
  /// log says why, once.
  void follow() noexcept;

 private:
  std::string stamp() const;

  const std::string path_;
  mutable std::mutex mutex_;
  std::shared_ptr<const KeyRing> ring_;
  std::string stamp_;  ///< of the file when it was read last
};

/// Paths that need no key: /health, /ready, /version, /ping, and /metrics when `metrics_open`.
bool is_open_path(std::string_view path, bool metrics_open);

}  // namespace glm53::api
