#include "agent/preflight/host.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <ifaddrs.h>
#include <system_error>
#include <unistd.h>

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/statvfs.h>

#include "common/file.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

namespace fs = std::filesystem;

std::string errno_text() {
  return std::system_category().message(errno);
}

uint32_t ipv4_of(const sockaddr* address) {
  sockaddr_in in{};
  std::memcpy(&in, address, sizeof in);
  return ntohl(in.sin_addr.s_addr);
}

struct FreeIfaddrs {
  void operator()(ifaddrs* list) const { ::freeifaddrs(list); }
};

/// Files of a write test, gone with the object.
struct Leftovers {
  std::vector<std::string> paths;
  ~Leftovers() {
    for (const std::string& path : paths) ::unlink(path.c_str());
  }
};

class Machine final : public Host {
 public:
  std::vector<InterfaceAddress> addresses() const override {
    ifaddrs* raw = nullptr;
    std::vector<InterfaceAddress> out;
    if (::getifaddrs(&raw) != 0) return out;
    const std::unique_ptr<ifaddrs, FreeIfaddrs> list(raw);
    for (const ifaddrs* a = list.get(); a != nullptr; a = a->ifa_next) {
      const bool usable = a->ifa_addr != nullptr && a->ifa_netmask != nullptr && (a->ifa_flags & IFF_UP) != 0;
      if (!usable || a->ifa_addr->sa_family != AF_INET) continue;
      out.push_back({a->ifa_name, ipv4_of(a->ifa_addr), std::popcount(ipv4_of(a->ifa_netmask))});
    }
    return out;
  }

  std::optional<Space> space(const std::string& path) const override {
    std::error_code ec;
    fs::path folder(path);
    while (!fs::exists(folder, ec) && folder.has_parent_path() && folder != folder.parent_path()) {
      folder = folder.parent_path();
    }
    struct statvfs s {};
    if (::statvfs(folder.c_str(), &s) != 0) return std::nullopt;
    const bool counts = s.f_files > 0;
    return Space{static_cast<int64_t>(s.f_bavail * s.f_frsize), counts ? static_cast<int64_t>(s.f_favail) : -1};
  }

  std::optional<std::string> write_trouble(const std::string& folder) const override {
    const std::string base = cat(folder, "/.glm53-preflight-", static_cast<int64_t>(::getpid()));
    const std::string file = base + ".a", moved = base + ".b", link = base + ".c";
    const Leftovers leftovers{{file, moved, link}};
    for (const std::string& path : leftovers.paths) ::unlink(path.c_str());
    const UniqueFd fd(::open(file.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
    if (!fd) return cat("cannot create a file: ", errno_text());
    if (::write(fd.get(), "x", 1) != 1) return cat("cannot write: ", errno_text());
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return cat("cannot lock a file: ", errno_text());
    if (::rename(file.c_str(), moved.c_str()) != 0) return cat("cannot rename a file: ", errno_text());
    if (::symlink("x", link.c_str()) != 0) return cat("cannot make a symbolic link: ", errno_text());
    return std::nullopt;
  }

  bool can_open(const std::string& path) const override {
    return static_cast<bool>(UniqueFd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK)));
  }

  GpuFacts gpus() const override { return ask_nvml(); }
};

}  // namespace

std::optional<uint32_t> parse_ipv4(const std::string& text) {
  in_addr v4{};
  if (inet_pton(AF_INET, text.c_str(), &v4) != 1) return std::nullopt;
  return ntohl(v4.s_addr);
}

std::string ipv4_text(uint32_t a) {
  return cat(a >> 24, ".", (a >> 16) & 255, ".", (a >> 8) & 255, ".", a & 255);
}

bool same_subnet(uint32_t a, uint32_t b, int prefix) {
  const uint32_t mask = prefix <= 0 ? 0 : ~uint32_t{0} << (32 - prefix);
  return (a & mask) == (b & mask);
}

std::unique_ptr<Host> this_machine() {
  return std::make_unique<Machine>();
}

}  // namespace glm53::preflight
