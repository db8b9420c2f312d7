#include "common/socket.h"

#include <array>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "common/error.h"
#include "common/strings.h"
#include "http_fixture.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace std::chrono_literals;
using glm53::test::soon;

namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

template <class Body>
std::string error_of(Body body, Code code) {
  try {
    body();
  } catch (const Error& e) {
    CHECK(name(e.code()) == name(code));
    return e.line();
  }
  return "";
}

}  // namespace

TEST_CASE("socket: TCP blocks there and back") {
  const UniqueFd listener = listen_tcp("127.0.0.1", 0);
  const uint16_t port = local_port(listener.get());
  CHECK(port != 0);
  const UniqueFd client = connect_tcp("127.0.0.1", port, soon());
  const UniqueFd server = accept_until(listener.get(), soon());
  REQUIRE(server);
  const std::string large(3000000, 'x');
  std::thread sender([&] {
    send_block(client.get(), bytes_of("small"));
    send_block(client.get(), {});
    send_block(client.get(), bytes_of(large));
  });
  CHECK(receive_block(server.get(), 100).size() == 5);
  CHECK(receive_block(server.get(), 100).empty());
  CHECK(receive_block(server.get(), large.size()).size() == large.size());
  sender.join();
  send_block(client.get(), bytes_of("too large"));
  CHECK(error_of([&] { receive_block(server.get(), 8); }, Code::corrupt).find("9 bytes announced") !=
        std::string::npos);
}

TEST_CASE("socket: the end of the stream and writing to nobody are peer_lost") {
  int pair[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  UniqueFd a(pair[0]), b(pair[1]);
  send_all(a.get(), bytes_of("abc"));
  a.reset();
  CHECK_FALSE(error_of([&] { receive_block(b.get(), 10); }, Code::peer_lost).empty());
  CHECK_FALSE(error_of([&] { send_all(b.get(), bytes_of("x")); }, Code::peer_lost).empty());
}

TEST_CASE("socket: non-blocking sockets wait, sockets with a time limit stall") {
  int pair[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
  const UniqueFd a(pair[0]), b(pair[1]);
  const std::string large(3000000, 'x');
  std::thread sender([&] { send_all(a.get(), bytes_of(large)); });
  std::vector<std::byte> received(large.size());
  receive_all(b.get(), received);
  sender.join();
  CHECK(received.back() == std::byte{'x'});
  REQUIRE(::fcntl(b.get(), F_SETFL, 0) == 0);
  const timeval limit{0, 10000};
  REQUIRE(::setsockopt(b.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
  CHECK_FALSE(error_of([&] { receive_all(b.get(), received); }, Code::stalled).empty());
}

TEST_CASE("socket: addresses in use, wrong or without a listener") {
  const UniqueFd listener = listen_tcp("127.0.0.1", 0);
  const uint16_t port = local_port(listener.get());
  CHECK(
      error_of([&] { listen_tcp("127.0.0.1", port); }, Code::busy).starts_with(cat("127.0.0.1:", port, " is in use")));
  CHECK_FALSE(error_of([&] { listen_tcp("localhost", 0); }, Code::config).empty());
  CHECK_FALSE(error_of([&] { listen_tcp("192.0.2.1", 0); }, Code::config).empty());
  uint16_t free_port = 0;
  {
    const UniqueFd closed = listen_tcp("127.0.0.1", 0);
    free_port = local_port(closed.get());
  }
  CHECK(error_of([&] { connect_tcp("127.0.0.1", free_port, soon()); }, Code::unavailable).find("refused") !=
        std::string::npos);
  CHECK_FALSE(accept_until(listener.get(), std::chrono::steady_clock::now()));
}

TEST_CASE("socket: unix sockets") {
  const test::TempDir folder;
  const std::string path = folder / "s";
  {
    const UniqueFd listener = listen_unix(path, 0660);
    struct stat info {};
    REQUIRE(::stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0660);
    const UniqueFd client = connect_unix(path);
    const UniqueFd server = accept_until(listener.get(), soon());
    CHECK(peer_credentials(server.get()).pid == ::getpid());
    CHECK(peer_credentials(server.get()).uid == ::getuid());
    CHECK(local_port(server.get()) == 0);
    CHECK(error_of([&] { listen_unix(path); }, Code::busy).find("is in use") != std::string::npos);
  }
  CHECK_FALSE(error_of([&] { connect_unix(path); }, Code::unavailable).empty());
  const UniqueFd again = listen_unix(path);  // the stale file is replaced
  write_file(folder / "file", "precious");
  CHECK_FALSE(error_of([&] { listen_unix(folder / "file"); }, Code::busy).empty());
  CHECK(read_file(folder / "file") == "precious");
  CHECK(error_of([&] { listen_unix(folder / std::string(200, 'x')); }, Code::config).find("1 to 107 bytes") !=
        std::string::npos);
}
