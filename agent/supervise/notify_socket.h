// Receiving end of a child's notices.
#pragma once

#include <optional>
#include <string>

#include "common/file.h"

namespace glm53::supervise {

/// A bound datagram socket file (mode 0600). Destroying it leaves the file, so that a next agent can bind it again.
class NotifySocket {
 public:
  /// Replaces whatever file is there. Throws Error(config) when the path is too long.
  explicit NotifySocket(std::string path);
  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  /// One datagram, or nullopt when none is waiting. Never blocks.
  std::optional<std::string> receive();
  /// Removes the file.
  void remove() noexcept;

 private:
  std::string path_;
  UniqueFd fd_;
};

}  // namespace glm53::supervise
