#include "tests/e2e/sshd.h"

#include <cstdio>
#include <iostream>
#include <signal.h>
#include <unistd.h>

#include <sys/stat.h>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

namespace glm53::e2e {
namespace {

using namespace std::chrono_literals;

/// Whether that process's network namespace has a listener at the port.
bool listens(pid_t pid, uint16_t port) {
  std::array<char, 8> hex{};
  std::snprintf(hex.data(), hex.size(), ":%04X", port);
  try {
    for (const std::string& line : split(read_file(cat("/proc/", pid, "/net/tcp"), size_t{1} << 20), '\n')) {
      const size_t at = line.find(hex.data());
      if (at != std::string::npos && line.find(" 0A ", at) != std::string::npos) return true;
    }
  } catch (const Error&) {
    return false;
  }
  return false;
}

}  // namespace

Sshd::Sshd(std::string folder, const std::string& address, uint16_t port, const std::vector<std::string>& prefix)
    : folder_(std::move(folder)), port_(port) {
  make_dirs(folder_, 0700);
  for (const char* key : {"host", "other", "user"}) {
    const ProgramResult made =
        run_program({"/usr/bin/env", "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path(key)}, folder_);
    if (made.code != 0) throw Error(Code::unavailable, cat("ssh-keygen: ", made.output));
  }
  for (const char* key : {"host", "other"}) {
    const std::string name = port_ == 22 ? address : cat("[", address, "]:", port_);
    write_file(path(cat("known.", std::string_view(key))),
               cat(name, " ", read_file(path(cat(std::string_view(key), ".pub")))));
  }
  write_file(path("known.none"), "");
  // Where it separates its privileges; else it does not start.
  if (::geteuid() == 0) (void)::mkdir("/run/sshd", 0755);
  write_file(path("config"),
             cat("Port ", port_, "\nListenAddress ", address, "\nHostKey ", path("host"), "\nAuthorizedKeysFile ",
                 path("user.pub"), "\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"));
  SpawnOptions options;
  options.argv = prefix;
  options.argv.insert(options.argv.end(), {kProgram, "-D", "-e", "-f", path("config")});
  options.env["PATH"] = "/usr/bin:/bin:/usr/sbin:/sbin";
  child_ = spawn(options);
  if (!wait_for([&] { return listens(child_.id.pid, port_); }, 20s))
    throw Error(Code::unavailable, cat("sshd does not listen at ", address, ":", port_));
}

Sshd::~Sshd() {
  try {
    signal_group(child_.id, SIGTERM);
    wait_until(child_.id.pid, std::chrono::steady_clock::now() + 10s);
  } catch (const std::exception& e) {
    std::cerr << "ending sshd: " << e.what() << "\n";
  }
}

}  // namespace glm53::e2e
