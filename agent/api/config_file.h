// The configuration file as it is now, beside the one that runs.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/config.h"

namespace glm53::agent {

/// Thread-safe.
class ConfigFile {
 public:
  /// Throws Error(config).
  explicit ConfigFile(std::string path);
  const std::string& path() const { return path_; }
  /// The last good one.
  Config config() const;
  /// Reads the file again. Throws Error(config) and keeps the last good one.
  Config reload();

  struct Drift {
    std::string hash_file;           ///< empty when the file is wrong
    std::vector<std::string> lines;  ///< "serve.max_seqs: runs with 4, the file says 8 (config.toml:12)"
    std::string error;
  };
  /// Compares what runs (flat JSON) with what the file and `settings` would give now. Reads the file only when it
  /// changed.
  Drift drift(const std::string& running_json, const std::map<std::string, std::string>& settings);

 private:
  const std::string path_;
  mutable std::mutex mutex_;
  Config config_;  // guarded by mutex_, as are the others
  std::string stamp_, key_;
  Drift drift_;
};

/// {"key":"value"} as a map; values that are no text are written as --set would write them. Throws Error(usage).
std::map<std::string, std::string> parse_settings(const std::string& json);
std::string settings_json(const std::map<std::string, std::string>& settings);

}  // namespace glm53::agent
