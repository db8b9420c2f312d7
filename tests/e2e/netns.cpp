#include "tests/e2e/netns.h"

#include <array>
#include <exception>
#include <fcntl.h>
#include <iostream>
#include <sched.h>
#include <thread>
#include <unistd.h>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

namespace glm53::e2e {
namespace {

constexpr std::array<const char*, 2> kHosts{"head", "worker"};

ProgramResult ip(const std::vector<std::string>& arguments) {
  std::vector<std::string> argv{"/usr/bin/env", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", "ip"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return run_program(argv, "/tmp");
}

void must(const std::vector<std::string>& arguments) {
  const ProgramResult result = ip(arguments);
  if (result.code != 0) throw Error(Code::unavailable, cat("ip: ", result.output));
}

std::string probe() {
  if (::geteuid() != 0) return "network namespaces need root here";
  const std::string name = cat("glm53-probe-", ::getpid());
  const ProgramResult made = ip({"netns", "add", name});
  if (made.code == 127) return "iproute2 is not installed";
  if (made.code != 0) return cat("ip netns add: ", trim(made.output));
  must({"netns", "del", name});
  return {};
}

}  // namespace

const std::string& Namespaces::why_not() {
  static const std::string why = probe();
  return why;
}

Namespaces::Namespaces() : base_(cat("glm53-", ::getpid(), "-")) {
  for (const std::string host : kHosts) must({"netns", "add", name(host)});
  must({"link", "add", "eth0", "netns", name("head"), "type", "veth", "peer", "name", "eth0", "netns", name("worker")});
  for (const std::string host : kHosts) {
    must({"-n", name(host), "addr", "add", address(host) + "/24", "dev", "eth0"});
    must({"-n", name(host), "link", "set", "lo", "up"});
    must({"-n", name(host), "link", "set", "eth0", "up"});
  }
}

Namespaces::~Namespaces() {
  try {
    for (const std::string host : kHosts) must({"netns", "del", name(host)});
  } catch (const std::exception& e) {
    std::cerr << "removing network namespaces: " << e.what() << "\n";
  }
}

std::vector<std::string> Namespaces::in(const std::string& host, const std::vector<std::string>& argv) const {
  std::vector<std::string> whole{"/sbin/ip", "netns", "exec", name(host)};
  whole.insert(whole.end(), argv.begin(), argv.end());
  return whole;
}

void Namespaces::set_link(const std::string& host, bool up) const {
  must({"-n", name(host), "link", "set", "eth0", up ? "up" : "down"});
}

void Namespaces::inside(const std::string& host, const std::function<void()>& call) const {
  std::exception_ptr failure;
  std::thread thread([&] {
    try {
      const std::string path = "/run/netns/" + name(host);
      const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      if (!fd || ::setns(fd.get(), CLONE_NEWNET) != 0) throw_errno(Code::unavailable, path);
      call();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace glm53::e2e
