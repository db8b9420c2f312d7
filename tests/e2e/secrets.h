// Where a secret must never be: in command lines, environments and files. A test says what its secrets are, and which
// files exist to hold them.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace glm53::e2e {

/// Looks at the command line and environment of every process of the machine, again and again while it lives.
class SecretWatch {
 public:
  explicit SecretWatch(std::chrono::milliseconds period = std::chrono::milliseconds(50));
  ~SecretWatch();
  SecretWatch(const SecretWatch&) = delete;
  SecretWatch& operator=(const SecretWatch&) = delete;

  /// From now on this text is a secret; `name` says which in what is found. Texts of fewer than 8 bytes are refused.
  void add(const std::string& name, const std::string& text);
  /// Every line of the key in a PEM file.
  void add_key(const std::string& name, const std::string& file);
  /// "NAME in FILE" for each regular file below the folder that is not in `keepers` and has one in its bytes (whatever
  /// the file is: logs, databases and what they have not written back yet).
  std::vector<std::string> in_files(const std::string& folder, const std::set<std::string>& keepers) const;
  /// "NAME in what" when the text has one.
  std::vector<std::string> in_text(const std::string& what, const std::string& text) const;
  /// "NAME in the cmdline of PROGRAM" of all processes seen so far.
  std::set<std::string> in_processes() const;
  /// How often all processes were looked at.
  int64_t rounds() const { return rounds_; }

 private:
  void look();
  mutable std::mutex mutex_;                    // guards the next two
  std::map<std::string, std::string> secrets_;  ///< text -> name
  std::set<std::string> found_;
  std::atomic<int64_t> rounds_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace glm53::e2e
