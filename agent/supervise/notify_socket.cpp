#include "agent/supervise/notify_socket.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <unistd.h>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::supervise {

NotifySocket::NotifySocket(std::string path) : path_(std::move(path)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path_.size() >= sizeof address.sun_path) {
    throw Error(Code::config, cat("socket path ", path_, " is longer than ", sizeof address.sun_path - 1, " bytes"),
                "set a shorter paths.run");
  }
  std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
  fd_ = UniqueFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd_) throw_errno(Code::unavailable, "cannot make a notify socket");
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) throw_errno(Code::unavailable, "cannot replace " + path_);
  if (::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    throw_errno(Code::unavailable, "cannot bind " + path_);
  }
  if (::chmod(path_.c_str(), 0600) != 0) throw_errno(Code::unavailable, "cannot restrict " + path_);
}

std::optional<std::string> NotifySocket::receive() {
  std::array<char, 8192> buffer;
  ssize_t n;
  do {
    n = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return std::nullopt;
  return std::string(buffer.data(), static_cast<size_t>(n));
}

void NotifySocket::remove() noexcept {
  ::unlink(path_.c_str());
}

}  // namespace glm53::supervise
