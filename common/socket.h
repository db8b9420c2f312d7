// Stream sockets with deadlines: TCP and unix.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sys/types.h>

#include "common/file.h"

namespace glm53 {

using Deadline = std::chrono::steady_clock::time_point;

/// Listening TCP socket on a numeric address; port 0 picks one. Throws Error(busy) "address:port is in use".
UniqueFd listen_tcp(const std::string& address, uint16_t port, int backlog = 1024);
uint16_t local_port(int fd);
/// Connected TCP socket with TCP_NODELAY. Throws Error(unavailable).
UniqueFd connect_tcp(const std::string& address, uint16_t port, Deadline deadline);
/// Listening unix socket; replaces a stale file nobody listens on, throws Error(busy) when somebody does. Paths of up
/// to 107 bytes.
UniqueFd listen_unix(const std::string& path, int mode = 0600);
UniqueFd connect_unix(const std::string& path);
/// Accepts one connection; an empty UniqueFd at the deadline.
UniqueFd accept_until(int listener, Deadline deadline);

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};
PeerCredentials peer_credentials(int unix_socket);

/// Whole buffers. Throw Error(peer_lost) at the end of the stream or on a reset; SIGPIPE is never raised.
void send_all(int fd, std::span<const std::byte> data);
void receive_all(int fd, std::span<std::byte> data);
/// u32 length prefix and body; receive refuses bodies over `limit` with Error(corrupt).
void send_block(int fd, std::span<const std::byte> body);
std::vector<std::byte> receive_block(int fd, size_t limit);

}  // namespace glm53
