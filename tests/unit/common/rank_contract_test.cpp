#include "common/rank_contract.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "common/error.h"
#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

using namespace glm53;

namespace {

/// Sets $NOTIFY_SOCKET for a while.
class NotifySocket {
 public:
  explicit NotifySocket(const std::string& value) { ::setenv("NOTIFY_SOCKET", value.c_str(), 1); }
  ~NotifySocket() { ::unsetenv("NOTIFY_SOCKET"); }
};

UniqueFd bind_datagram(std::string path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  return fd;
}

std::string receive(const UniqueFd& fd) {
  std::array<char, 65536> buffer;
  const ssize_t n = ::recv(fd.get(), buffer.data(), buffer.size(), 0);
  return n < 0 ? "<none>" : std::string(buffer.data(), static_cast<size_t>(n));
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

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("rank contract: phases and exits have names") {
  for (int i = 0; i <= static_cast<int>(Phase::draining); ++i) {
    const auto phase = static_cast<Phase>(i);
    CHECK(parse_phase(name(phase)) == phase);
  }
  CHECK(name(Phase::load_target) == "load_target");
  CHECK_FALSE(parse_phase("loading"));
  CHECK(describe_exit(68, 0) == "peer lost");
  CHECK(describe_exit(0, 9) == "killed by signal 9");
  CHECK(describe_exit(-15, 0) == "killed by signal 15");
  CHECK(describe_exit(1, 0) == "exit code 1");
}

TEST_CASE("rank contract: notices come back as they were") {
  Notice n;
  n.ready = n.stopping = n.watchdog = true;
  n.phase = Phase::warmup;
  n.progress = {5, 10};
  n.status = "two\nlines";
  n.error = "E";
  n.extend_us = 7;
  const Notice back = parse_notice(encode(n));
  CHECK((back.ready && back.stopping && back.watchdog));
  CHECK(back.phase == n.phase);
  CHECK(back.progress == n.progress);
  CHECK(back.status == "two lines");
  CHECK(back.error == "E");
  CHECK(back.extend_us == 7);
  CHECK(encode(Notice{}).empty());
}

TEST_CASE("rank contract: unknown and malformed fields are ignored one by one") {
  const Notice n = parse_notice(
      "READY=yes\nMAINPID=1\nX_GLM53_PHASE=flying\nX_GLM53_PROGRESS=11/10\nSTATUS=\xff\n\n=\nnonsense\n"
      "EXTEND_TIMEOUT_USEC=-1\nWATCHDOG=1");
  CHECK_FALSE(n.ready);
  CHECK_FALSE(n.phase);
  CHECK_FALSE(n.progress);
  CHECK_FALSE(n.status);
  CHECK_FALSE(n.extend_us);
  CHECK(n.watchdog);
  for (const char* bad : {"", "/", "1", "1/", "/1", "-1/2", "1/2/3", "a/b", "1/99999999999999999999"}) {
    CHECK_FALSE(parse_notice(cat("X_GLM53_PROGRESS=", bad)).progress);
  }
}

TEST_CASE("rank contract: notices of random bytes") {
  const std::string good =
      "READY=1\nX_GLM53_PHASE=ready\nX_GLM53_PROGRESS=1/2\nSTATUS=s\nX_GLM53_ERROR=e\nEXTEND_TIMEOUT_USEC=1\n";
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::string text = good.substr(0, random() % (good.size() + 1));
    for (int i = 0; i < 5 && !text.empty(); ++i) text[random() % text.size()] = static_cast<char>(random());
    const Notice n = parse_notice(text);
    if (n.progress) CHECK(n.progress->first <= n.progress->second);
    const Notice again = parse_notice(encode(n));  // what was taken is sound
    CHECK(again.phase == n.phase);
    CHECK(again.status == n.status);
    CHECK(again.error == n.error);
  }
}

TEST_CASE("rank contract: the notifier sends to a path or an abstract socket, and is silent without one") {
  const test::TempDir folder;
  {
    const UniqueFd agent = bind_datagram(folder / "notify");
    const NotifySocket variable(folder / "notify");
    Notifier notifier;
    notifier.phase(Phase::init);
    CHECK(receive(agent) == "X_GLM53_PHASE=init\n");
    notifier.progress(1, 2);
    CHECK(receive(agent) == "X_GLM53_PROGRESS=1/2\n");
    notifier.ready();
    CHECK(parse_notice(receive(agent)).ready);
    notifier.error("broken\npipe");
    CHECK(receive(agent) == "X_GLM53_ERROR=broken pipe\n");
    for (int i = 0; i < 5000; ++i) notifier.watchdog();  // a full queue must not block
    CHECK(receive(agent) == "WATCHDOG=1\n");
  }
  {
    const std::string abstract = cat("glm53-test-", ::getpid());
    const UniqueFd agent = bind_datagram(std::string(1, '\0') + abstract);
    const NotifySocket variable("@" + abstract);
    Notifier().watchdog();
    CHECK(receive(agent) == "WATCHDOG=1\n");
  }
  Notifier().ready();
  const NotifySocket nobody(folder / "nobody");
  Notifier().ready();
  const NotifySocket too_long(std::string(1000, 'x'));
  Notifier().ready();
}

TEST_CASE("rank contract: configuration documents") {
  RankConfig rank;
  rank.generation = 42;
  rank.rank = 1;
  rank.size = 2;
  rank.device = 3;
  rank.node = "worker";
  rank.rendezvous_host = "127.0.0.1";
  rank.rendezvous_port = 29521;
  rank.bind_address = "127.0.0.2";
  rank.api_socket = "/a";
  rank.admin_socket = "/b";
  rank.config_hash = "h";
  rank.config_json = R"({"serve.max_seqs":8})";
  const std::string text = to_json(rank);
  CHECK(to_json(parse_rank_config(text)) == text);
  CHECK(parse_rank_config(text).config_json == rank.config_json);
  CHECK(parse_rank_config(text).rendezvous_port == 29521);
  const auto broken = [&](std::string_view from, std::string_view to) {
    return error_of([&] { parse_rank_config(replaced(text, from, to)); }, Code::config);
  };
  CHECK(broken("\"node\":", "\"nod\":") == "rank configuration: member 'node' is missing");
  CHECK(broken("\"rank\":1", "\"rank\":2") == "rank configuration: member 'rank' is 2 — a value from 0 to 1");
  CHECK(broken("\"rank\":1", "\"rank\":\"1\"") == "rank configuration: member 'rank' must be an integer, not string");
  CHECK(broken(":29521", ":65536").starts_with("rank configuration: member 'rendezvous_port' is 65536"));
  CHECK(broken(":42", ":18446744073709551615").find("'generation'") != std::string::npos);
  CHECK(broken("{\"serve.max_seqs\":8}", "[]") == "rank configuration: member 'config' must be an object, not array");
  CHECK(broken("}", "").find("invalid JSON") != std::string::npos);
  CHECK(error_of([] { parse_rank_config("[]"); }, Code::config) == "rank configuration: expected a JSON object");

  ApiConfig api;
  api.rank_socket = "/a";
  api.admin_socket = "/b";
  api.bind = "::1";
  api.port = 8888;
  api.version = "1";
  const std::string api_text = to_json(api);
  CHECK(to_json(parse_api_config(api_text)) == api_text);
  CHECK(parse_api_config(api_text).config_json == "{}");
  CHECK(error_of([&] { parse_api_config("{}"); }, Code::config) ==
        "API configuration: member 'rank_socket' is missing");
}

TEST_CASE("rank contract: admin calls") {
  const test::TempDir folder;
  const std::string path = folder / "admin.sock";
  error_of([&] { admin_call(path, "counters"); }, Code::unavailable);
  CHECK_THROWS_AS(admin_call(path, "counters"), Error);
  const UniqueFd listener = listen_unix(path);
  const auto serve = [&](std::string_view answer, std::string& asked) {
    return std::thread([&listener, &asked, answer = std::string(answer)] {
      const UniqueFd fd = accept_until(listener.get(), std::chrono::steady_clock::now() + std::chrono::seconds(20));
      while (fd && !asked.ends_with('\n')) {
        std::byte b{};
        receive_all(fd.get(), std::span(&b, 1));
        asked += static_cast<char>(b);
      }
      for (const char& c : answer) send_all(fd.get(), std::as_bytes(std::span(&c, 1)));
    });
  };
  std::string asked;
  auto server = serve("{\"ok\":true}\n", asked);
  CHECK(admin_call(path, "gate_open") == "{\"ok\":true}");
  server.join();
  CHECK(asked == "{\"do\":\"gate_open\"}\n");
  asked.clear();
  server = serve("half an ans", asked);
  CHECK_FALSE(error_of([&] { admin_call(path, R"({"do":"canary","prompt":"x"})"); }, Code::peer_lost).empty());
  server.join();
  CHECK(asked == "{\"do\":\"canary\",\"prompt\":\"x\"}\n");
  CHECK_FALSE(error_of([&] { admin_call(path, "drain", 50); }, Code::stalled).empty());
}
