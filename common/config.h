// Configuration: one table of keys, one spelling (the dotted TOML key) in files, --set, JSON for the engine, errors and
// docs.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace glm53 {

enum class KeyType { text, integer, real, boolean, bytes, duration, list };
/// Who may set a key: `node` keys belong to one machine's file; `cluster` keys belong to the head, which sends the
/// effective ones to every rank.
enum class KeyScope { node, cluster };

struct ConfigKey {
  std::string_view name;  ///< "serve.max_seqs"
  KeyType type;
  KeyScope scope;
  std::string_view
      fallback;             ///< default as text, in the form of --set; "" = none (text) or must be set where `required`
  std::string_view unit;    ///< "tokens", "bytes", …; "" = none
  std::string_view doc;     ///< one or two sentences
  double min = 0, max = 0;  ///< bounds of numbers, bytes (bytes), durations (ms); max 0 = none
  std::string_view choices = "";  ///< "a|b|c": the only values allowed; "" = any
};
/// Every key of the project, in the order of config.toml.example.
std::span<const ConfigKey> config_keys();

/// A validated configuration: every key has a value (its default if nothing else) and a source.
class Config {
 public:
  Config();
  /// Throws Error(config) naming file, line, key: unknown key (with the nearest name), wrong type, out of bounds,
  /// unreadable file.
  static Config load(const std::string& path);
  static Config parse(std::string_view toml, const std::string& source);
  /// Flat object of dotted keys, as to_json() writes it; unknown keys are errors.
  static Config from_json(const nlohmann::ordered_json& flat, const std::string& source);

  /// --set key=value. Throws Error(usage).
  void set(std::string_view key, std::string_view value, const std::string& source);

  const std::string& text(std::string_view key) const;
  int64_t integer(std::string_view key) const;  ///< integers and bytes
  double real(std::string_view key) const;
  bool boolean(std::string_view key) const;
  std::chrono::milliseconds duration(std::string_view key) const;
  const std::vector<std::string>& list(std::string_view key) const;
  /// "default", "config.toml:12", "--set", …
  const std::string& source(std::string_view key) const;

  /// Flat object of dotted keys; only_cluster leaves out node keys. Values that name secrets are paths, never secrets.
  nlohmann::ordered_json to_json(bool only_cluster = false) const;
  /// SHA-256 over the cluster keys: what ranks agree on at rendezvous.
  std::string hash() const;
  /// Folder of the file it came from (for relative paths), or ".".
  const std::string& base_dir() const { return base_dir_; }
  /// A path value made absolute against base_dir().
  std::string path(std::string_view key) const;

 private:
  void assign(const ConfigKey& key, const nlohmann::ordered_json& value, std::string_view found,
              const std::string& source);

  struct Value {
    std::string text;
    std::vector<std::string> list;
    std::string source;
  };
  std::map<std::string, Value, std::less<>> values_;
  std::string base_dir_ = ".";
};

/// config.toml.example, generated from the table (a test keeps the file equal).
std::string example_config();

/// "head:0" -> node "head", device 0.
struct RankPlace {
  std::string node;
  int device = 0;
};
std::vector<RankPlace> parse_ranks(const Config& config);  ///< topology.ranks; throws Error(config)
/// "127.0.0.1:8890" or "[::1]:8890". Throws Error(config).
struct HostPort {
  std::string host;
  uint16_t port = 0;
};
HostPort parse_host_port(std::string_view text);

}  // namespace glm53
