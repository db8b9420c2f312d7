// Raw loopback clients of HttpServer: what real clients never do can be done here.
#pragma once

#include <array>
#include <chrono>
#include <poll.h>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>

#include <sys/socket.h>

#include "common/file.h"
#include "common/socket.h"

namespace glm53::test {

inline Deadline soon(int seconds = 20) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
}

class RawClient {
 public:
  explicit RawClient(uint16_t port) : fd_(connect_tcp("127.0.0.1", port, soon())) {}
  explicit RawClient(UniqueFd fd) : fd_(std::move(fd)) {}
  void send(std::string_view text) { send_all(fd_.get(), std::as_bytes(std::span(text.data(), text.size()))); }
  /// What comes up to the end of `token`, or of the stream; what follows stays for the next call.
  std::string read_until(std::string_view token) {
    size_t at = 0;
    while ((at = text_.find(token)) == std::string::npos) {
      if (!receive()) return std::exchange(text_, {});
    }
    std::string out = text_.substr(0, at + token.size());
    text_.erase(0, out.size());
    return out;
  }
  std::string read_to_end() {
    while (receive()) {
    }
    return std::exchange(text_, {});
  }
  int fd() const { return fd_.get(); }
  void close() { fd_.reset(); }
  void half_close() { ::shutdown(fd_.get(), SHUT_WR); }

 private:
  bool receive() {
    pollfd p{fd_.get(), POLLIN, 0};
    if (::poll(&p, 1, 20000) != 1) {
      text_ += "<timeout>";
      return false;
    }
    std::array<char, 65536> buffer;
    const ssize_t n = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (n <= 0) return false;
    text_.append(buffer.data(), static_cast<size_t>(n));
    return true;
  }
  UniqueFd fd_;
  std::string text_;
};

}  // namespace glm53::test
