// An sshd of the test's own: its keys, its port, this user.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/process.h"

namespace glm53::e2e {

class Sshd {
 public:
  static constexpr const char* kProgram = "/usr/sbin/sshd";

  /// Makes the keys `host`, `other` (a host key that nobody has) and `user` in the folder, and known.host, known.other
  /// and known.none, then listens. `prefix` goes before its command line (such as "ip netns exec NAME"). Throws Error.
  Sshd(std::string folder, const std::string& address, uint16_t port, const std::vector<std::string>& prefix = {});
  ~Sshd();
  Sshd(const Sshd&) = delete;
  Sshd& operator=(const Sshd&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  uint16_t port() const { return port_; }

 private:
  const std::string folder_;
  const uint16_t port_;
  Child child_;
};

}  // namespace glm53::e2e
