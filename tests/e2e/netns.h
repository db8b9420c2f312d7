// Two hosts for a test: network namespaces with a veth pair between them. Needs root and iproute2.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace glm53::e2e {

class Namespaces {
 public:
  /// Why this machine, or this user, can have none; empty when it can.
  static const std::string& why_not();

  /// "head" has 10.53.0.1, "worker" 10.53.0.2, each its own loopback and nothing else. Throws Error.
  Namespaces();
  /// Removes both; processes in them must have ended.
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  static std::string address(const std::string& host) { return host == "head" ? "10.53.0.1" : "10.53.0.2"; }
  /// The command line that runs `argv` there.
  std::vector<std::string> in(const std::string& host, const std::vector<std::string>& argv = {}) const;
  /// Takes that host's end of the cable out, or plugs it in.
  void set_link(const std::string& host, bool up) const;
  /// Calls on a thread of that host: sockets it opens, and those of threads it starts, belong there. Rethrows.
  void inside(const std::string& host, const std::function<void()>& call) const;

 private:
  std::string name(const std::string& host) const { return base_ + host; }
  std::string base_;
};

}  // namespace glm53::e2e
