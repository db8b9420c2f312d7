#include "common/socket.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netdb.h>
#include <poll.h>
#include <unistd.h>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

std::string place(const std::string& address, uint16_t port) {
  return address.find(':') == std::string::npos ? cat(address, ":", port) : cat("[", address, "]:", port);
}

Addresses resolve(const std::string& address, uint16_t port, int flags, Code code) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  Addresses owned(list);
  if (error == 0 && owned) return owned;
  if ((flags & AI_NUMERICHOST) != 0) {
    throw Error(code, cat("'", address, "' is not a numeric address"), "for example 127.0.0.1, 0.0.0.0 or ::");
  }
  throw Error(code, cat("cannot resolve '", address, "': ", std::string(::gai_strerror(error))));
}

void set_option(int fd, int level, int option, int value) {
  if (::setsockopt(fd, level, option, &value, sizeof value) != 0) throw_errno(Code::internal, "setsockopt");
}

/// Milliseconds for poll(), rounded up; 0 when the deadline has passed.
int left_ms(Deadline deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  if (left <= Deadline::duration::zero()) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::min<int64_t>(ms, 1 << 30));
}

/// False at the deadline.
bool wait_for(int fd, short events, Deadline deadline) {
  while (true) {
    pollfd p{fd, events, 0};
    const int wait = left_ms(deadline);
    const int n = ::poll(&p, 1, wait);
    if (n > 0) return true;
    if (n == 0 && wait == 0) return false;
    if (n < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
  }
}

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    throw Error(Code::config, cat("unix socket path '", path, "' has ", path.size(), " bytes"),
                cat("use a path of 1 to ", sizeof address.sun_path - 1, " bytes"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

UniqueFd open_unix(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno(Code::unavailable, cat("cannot open a socket for '", path, "'"));
  return fd;
}

/// 0 or an errno.
int connect_errno(int fd, const sockaddr* address, socklen_t size) {
  while (::connect(fd, address, size) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

/// Removes a socket file nobody listens on; throws Error(busy) for everything else that stands there.
void remove_stale(const std::string& path, const sockaddr_un& address) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return;
  if (!S_ISSOCK(info.st_mode)) {
    throw Error(Code::busy, cat("'", path, "' exists and is not a socket"), "remove it or choose another path");
  }
  const UniqueFd probe = open_unix(path);
  // Non-blocking: a full backlog (EAGAIN) means that somebody listens.
  if (::fcntl(probe.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno(Code::internal, "fcntl");
  const int error = connect_errno(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  if (error != ECONNREFUSED && error != ENOENT) {
    throw Error(Code::busy, cat("unix socket '", path, "' is in use"), "stop the other process or choose another path");
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    throw_errno(Code::busy, cat("cannot remove the stale socket '", path, "'"));
  }
}

[[noreturn]] void throw_stream_error(const char* what) {
  if (errno == EPIPE || errno == ECONNRESET || errno == ETIMEDOUT) throw_errno(Code::peer_lost, what);
  throw_errno(Code::internal, what);
}

/// After EAGAIN: waits on a non-blocking socket; on a blocking one it was the socket's own time limit.
void wait_again(int fd, short events, const char* what) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) throw_errno(Code::internal, "fcntl");
  if ((flags & O_NONBLOCK) == 0)
    throw Error(Code::stalled, cat(std::string(what), ": no progress within the time limit"));
  pollfd p{fd, events, 0};
  if (::poll(&p, 1, -1) < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
}

UniqueFd connect_one(const addrinfo& to, Deadline deadline, int& error) {
  UniqueFd fd(::socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, to.ai_protocol));
  error = fd ? 0 : errno;
  if (!fd) return fd;
  if (::connect(fd.get(), to.ai_addr, to.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS || error == EINTR) {
      socklen_t size = sizeof error;
      if (!wait_for(fd.get(), POLLOUT, deadline)) {
        error = ETIMEDOUT;
      } else if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
        error = errno;
      }
    }
  }
  if (error != 0) return UniqueFd();
  if (::fcntl(fd.get(), F_SETFL, 0) != 0) throw_errno(Code::internal, "fcntl");
  set_option(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return fd;
}

}  // namespace

UniqueFd listen_tcp(const std::string& address, uint16_t port, int backlog) {
  const Addresses to = resolve(address, port, AI_NUMERICHOST | AI_PASSIVE, Code::config);
  UniqueFd fd(::socket(to->ai_family, to->ai_socktype | SOCK_CLOEXEC, to->ai_protocol));
  if (!fd) throw_errno(Code::unavailable, cat("cannot listen on ", place(address, port)));
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(fd.get(), to->ai_addr, to->ai_addrlen) != 0 || ::listen(fd.get(), backlog) != 0) {
    if (errno == EADDRINUSE) {
      throw Error(Code::busy, cat(place(address, port), " is in use"), "stop the other process or choose another port");
    }
    throw_errno(errno == EACCES ? Code::denied : Code::config, cat("cannot listen on ", place(address, port)));
  }
  return fd;
}

uint16_t local_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) throw_errno(Code::internal, "getsockname");
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  return 0;
}

UniqueFd connect_tcp(const std::string& address, uint16_t port, Deadline deadline) {
  const Addresses list = resolve(address, port, 0, Code::unavailable);
  int error = 0;
  for (const addrinfo* to = list.get(); to != nullptr; to = to->ai_next) {
    UniqueFd fd = connect_one(*to, deadline, error);
    if (fd) return fd;
  }
  errno = error;
  throw_errno(Code::unavailable, cat("cannot connect to ", place(address, port)));
}

UniqueFd listen_unix(const std::string& path, int mode) {
  const sockaddr_un address = unix_address(path);
  remove_stale(path, address);
  UniqueFd fd = open_unix(path);
  // The mode is set between bind and listen: until then nobody can connect.
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(path.c_str(), static_cast<mode_t>(mode)) != 0 || ::listen(fd.get(), 1024) != 0) {
    throw_errno(errno == EADDRINUSE ? Code::busy : Code::unavailable, cat("cannot listen on '", path, "'"));
  }
  return fd;
}

UniqueFd connect_unix(const std::string& path) {
  const sockaddr_un address = unix_address(path);
  UniqueFd fd = open_unix(path);
  errno = connect_errno(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  if (errno != 0) throw_errno(Code::unavailable, cat("cannot connect to '", path, "'"));
  return fd;
}

UniqueFd accept_until(int listener, Deadline deadline) {
  while (wait_for(listener, POLLIN, deadline)) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    UniqueFd fd(::accept4(listener, reinterpret_cast<sockaddr*>(&address), &size, SOCK_CLOEXEC));
    if (fd) {
      if (address.ss_family != AF_UNIX) set_option(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
      return fd;
    }
    if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN && errno != EPROTO) {
      throw_errno(Code::unavailable, "cannot accept a connection");
    }
  }
  return UniqueFd();
}

PeerCredentials peer_credentials(int unix_socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    throw_errno(Code::internal, "cannot tell who is at the other end of a unix socket");
  }
  return {credentials.pid, credentials.uid, credentials.gid};
}

void send_all(int fd, std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t n = ::send(fd, data.data(), data.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      data = data.subspan(static_cast<size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_again(fd, POLLOUT, "send");
    } else if (errno != EINTR) {
      throw_stream_error("send");
    }
  }
}

void receive_all(int fd, std::span<std::byte> data) {
  while (!data.empty()) {
    const ssize_t n = ::recv(fd, data.data(), data.size(), 0);
    if (n > 0) {
      data = data.subspan(static_cast<size_t>(n));
    } else if (n == 0) {
      throw Error(Code::peer_lost, "the other end closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_again(fd, POLLIN, "receive");
    } else if (errno != EINTR) {
      throw_stream_error("receive");
    }
  }
}

void send_block(int fd, std::span<const std::byte> body) {
  if (body.size() > UINT32_MAX)
    throw Error(Code::internal, cat("a block of ", body.size(), " bytes is too large to send"));
  const auto size = static_cast<uint32_t>(body.size());
  std::array<std::byte, sizeof size> head;
  std::memcpy(head.data(), &size, sizeof size);
  // One segment for small blocks: two sends would cost a small packet each (TCP_NODELAY).
  if (body.size() <= 64 << 10) {
    std::vector<std::byte> whole(head.begin(), head.end());
    whole.insert(whole.end(), body.begin(), body.end());
    return send_all(fd, whole);
  }
  send_all(fd, head);
  send_all(fd, body);
}

std::vector<std::byte> receive_block(int fd, size_t limit) {
  uint32_t size = 0;
  receive_all(fd, std::as_writable_bytes(std::span(&size, 1)));
  if (size > limit)
    throw Error(Code::corrupt, cat("a block of ", size, " bytes announced, at most ", limit, " allowed"));
  std::vector<std::byte> body(size);
  receive_all(fd, body);
  return body;
}

}  // namespace glm53
