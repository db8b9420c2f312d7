// Many clients: 10,000 connections from another process, served up to the limit and refused behind it, in order; and
// slow readers.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <signal.h>
#include <string_view>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "common/error.h"
#include "common/http_server.h"
#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"
#include "http_fixture.h"

using namespace glm53;

namespace {

constexpr size_t kWanted = 10000;
constexpr size_t kBatch = 200;  // connections opened and asked at once
/// Descriptors that a process needs besides.
constexpr size_t kOthers = 300;

/// Descriptors that this process may have now.
size_t raised_limit() {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return 0;
  files.rlim_cur = files.rlim_max;
  // Where it is refused, the old limit stays.
  if (::setrlimit(RLIMIT_NOFILE, &files) != 0 || ::getrlimit(RLIMIT_NOFILE, &files) != 0) return 0;
  return static_cast<size_t>(std::min<rlim_t>(files.rlim_cur, 1u << 20));
}

template <class T>
void put(int fd, const T& value) {
  send_all(fd, std::as_bytes(std::span(&value, 1)));
}

template <class T>
T get(int fd) {
  T value{};
  if (::recv(fd, &value, sizeof value, MSG_WAITALL) != static_cast<ssize_t>(sizeof value))
    throw Error(Code::peer_lost, "the other process is gone");
  return value;
}

/// Status of the answer on a connection; 0 when none came.
int status_on(int fd) {
  constexpr std::string_view kStart = "HTTP/1.1 ";
  std::array<char, 4096> head{};
  size_t have = 0;
  while (have < kStart.size() + 3) {
    const ssize_t n = ::recv(fd, head.data() + have, head.size() - have, 0);
    if (n <= 0) return 0;
    have += static_cast<size_t>(n);
  }
  return static_cast<int>(parse_int(std::string_view(head.data() + kStart.size(), 3)).value_or(0));
}

/// What one of many clients saw.
struct Seen {
  uint32_t served = 0, refused = 0, other = 0;
  uint32_t served_late = 0;  ///< behind one that was refused
};

/// The other process: opens the connections, asks on each, tells what came, and holds those that were served until it
/// is told to go.
Seen ask_on_many(uint16_t port, size_t count, std::vector<UniqueFd>& held) {
  constexpr std::string_view kAsk = "GET /hello HTTP/1.1\r\n\r\n";
  Seen seen;
  for (size_t begin = 0; begin < count; begin += kBatch) {
    std::vector<UniqueFd> batch;
    for (size_t i = 0; i < std::min(kBatch, count - begin); ++i)
      batch.push_back(connect_tcp("127.0.0.1", port, test::soon(60)));
    for (const UniqueFd& fd : batch) {
      // One that is refused may be closed already.
      if (::send(fd.get(), kAsk.data(), kAsk.size(), MSG_NOSIGNAL) < 0) continue;
    }
    for (UniqueFd& fd : batch) {
      const int status = status_on(fd.get());
      if (status == 200 && seen.refused > 0) ++seen.served_late;
      ++(status == 200 ? seen.served : status == 503 ? seen.refused : seen.other);
      if (status == 200) held.push_back(std::move(fd));
    }
  }
  return seen;
}

[[noreturn]] void client_process(int fd) {
  int code = 1;
  try {
    raised_limit();
    const auto port = get<uint16_t>(fd);
    const auto count = get<uint64_t>(fd);
    std::vector<UniqueFd> held;
    put(fd, ask_on_many(port, count, held));
    get<char>(fd);
    code = 0;
  } catch (const std::exception&) {
    // The parent sees the end of the socket.
  }
  ::_exit(code);
}

/// Ends with the test, however that ends.
class ClientProcess {
 public:
  explicit ClientProcess(pid_t pid) : pid_(pid) {}
  ~ClientProcess() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  ClientProcess(const ClientProcess&) = delete;
  ClientProcess& operator=(const ClientProcess&) = delete;
  int wait() {
    int status = -1;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_;
};

}  // namespace

TEST_CASE("http server: of 10,000 connections those within the limit are served, the others refused, in order") {
  const size_t limit = raised_limit();
  REQUIRE(limit > 2 * kBatch + kOthers);
  const size_t count = std::min(kWanted, (limit - kOthers) / kBatch * kBatch);
  if (count < kWanted) MESSAGE("this process may have ", limit, " descriptors: ", count, " connections");
  const size_t within = std::max<size_t>(1, count / kBatch * 4 / 5) * kBatch;

  std::array<int, 2> pair{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) == 0);
  UniqueFd mine(pair[0]), theirs(pair[1]);
  const pid_t pid = ::fork();  // before the server has threads
  REQUIRE(pid >= 0);
  if (pid == 0) {
    mine.reset();
    client_process(theirs.get());
  }
  ClientProcess child(pid);
  theirs.reset();

  HttpServerOptions options;
  options.max_connections = within;
  HttpServer server(options);
  server.route("GET", "/hello", [](const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    reply->send({200, "hello", "text/plain", {}});
  });
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  const uint64_t before = resident_bytes(::getpid());
  test::RawClient early(port);  // has its place before all others
  early.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(early.read_until("hello").starts_with("HTTP/1.1 200"));

  put(mine.get(), port);
  put(mine.get(), uint64_t{count});
  const auto seen = get<Seen>(mine.get());
  CHECK(seen.served == within - 1);
  CHECK(seen.refused == count - within + 1);
  CHECK(seen.other == 0);
  CHECK(seen.served_late == 0);
  CHECK(server.connections() == within);
  CHECK(resident_bytes(::getpid()) - before < within * (size_t{20} << 10));
  early.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(early.read_until("hello").starts_with("HTTP/1.1 200"));

  put(mine.get(), 'x');
  CHECK(child.wait() == 0);
  const auto end = test::soon();
  while (server.connections() > 1 && std::chrono::steady_clock::now() < end) ::usleep(1000);
  CHECK(server.connections() == 1);
  test::RawClient late(port);
  late.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(late.read_until("hello").starts_with("HTTP/1.1 200"));
  server.stop(std::chrono::milliseconds(0));
}

TEST_CASE("http server: 64 clients that never read hold no more memory than their backlogs") {
  constexpr size_t kClients = 64, kBacklog = size_t{128} << 10, kChunk = size_t{16} << 10;
  HttpServerOptions options;
  options.max_backlog = kBacklog;
  HttpServer server(options);
  std::mutex mutex;
  std::vector<std::shared_ptr<HttpReply>> streams;  // guarded by mutex
  server.route("GET", "/stream", [&](const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    reply->start_stream(200, "text/plain");
    const std::scoped_lock lock(mutex);
    streams.push_back(reply);
  });
  server.route("GET", "/hello", [](const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    reply->send({200, "hello", "text/plain", {}});
  });
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  std::vector<test::RawClient> clients;
  for (size_t i = 0; i < kClients; ++i) {
    clients.emplace_back(port);
    clients.back().send("GET /stream HTTP/1.1\r\n\r\n");
  }
  const auto end = test::soon();
  const auto all_there = [&] {
    const std::scoped_lock lock(mutex);
    return streams.size() == kClients;
  };
  while (!all_there() && std::chrono::steady_clock::now() < end) ::usleep(1000);
  REQUIRE(all_there());

  const uint64_t before = resident_bytes(::getpid());
  size_t most = 0, cut = 0;
  // As much to each as it takes; without a limit that would be 4 GiB.
  for (size_t round = 0; round < 4096 && cut < kClients; ++round) {
    for (auto& stream : streams) {
      if (!stream || stream->write(std::string(kChunk, 'x'))) continue;
      stream.reset();
      ++cut;
    }
    most = std::max<size_t>(most, resident_bytes(::getpid()));
  }
  CHECK(cut == kClients);
  CHECK(most - std::min<size_t>(most, before) < 2 * kClients * (kBacklog + kChunk));
  test::RawClient other(port);
  other.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(other.read_until("hello").starts_with("HTTP/1.1 200"));
  server.stop(std::chrono::milliseconds(0));
}
