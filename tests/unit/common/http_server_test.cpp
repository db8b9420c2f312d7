#include "common/http_server.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <future>
#include <mutex>
#include <random>
#include <thread>

#include <doctest/doctest.h>
#include <netinet/in.h>

#include "common/error.h"
#include "common/process.h"
#include "common/strings.h"
#include "http_fixture.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace std::chrono_literals;
using glm53::test::RawClient;

namespace {

/// A server with the handlers that the tests below need.
class Fixture {
 public:
  explicit Fixture(HttpServerOptions options = {}) : server(std::move(options)) {
    server.route("GET", "/hello", [](const HttpRequest&, std::shared_ptr<HttpReply> reply) {
      reply->send({200, "hello", "text/plain", {}});
    });
    server.route("POST", "/echo", [](const HttpRequest& r, std::shared_ptr<HttpReply> reply) {
      reply->send({200, r.body, "text/plain", {}});
    });
    server.route("GET", "/items/{id}", [](const HttpRequest& r, std::shared_ptr<HttpReply> reply) {
      reply->send(
          {200, cat("id=", r.params.at("id"), " q=", r.query.contains("q") ? r.query.at("q") : "-"), "text/plain", {}});
    });
    server.route("GET", "/throw",
                 [](const HttpRequest&, std::shared_ptr<HttpReply>) { throw Error(Code::busy, "taken", "wait"); });
    server.route("GET", "/throw-int", [](const HttpRequest&, std::shared_ptr<HttpReply>) { throw 1; });
    server.route("GET", "/forget", [](const HttpRequest&, std::shared_ptr<HttpReply>) {});
    // Keeps the reply until the test asks for it.
    server.route("GET", "/hold", [this](const HttpRequest&, std::shared_ptr<HttpReply> reply) {
      reply->on_disconnect([this] {
        disconnects.fetch_add(1);
        changed.notify_all();
      });
      const std::lock_guard lock(mutex);
      held = std::move(reply);
      changed.notify_all();
    });
    server.route("GET", "/peer", [](const HttpRequest& r, std::shared_ptr<HttpReply> reply) {
      reply->send({200,
                   r.credentials ? cat(r.peer, " ", r.credentials->pid, " ", r.credentials->uid) : r.peer,
                   "text/plain",
                   {}});
    });
    port = server.listen_tcp("127.0.0.1", 0);
    server.start();
  }
  std::shared_ptr<HttpReply> take_held() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, 20s, [&] { return held != nullptr; });
    return std::exchange(held, nullptr);
  }
  bool wait_for_disconnects(int n) {
    std::unique_lock lock(mutex);
    while (disconnects < n && std::chrono::steady_clock::now() < deadline) changed.wait_for(lock, 10ms);
    return disconnects == n;
  }
  std::chrono::steady_clock::time_point deadline = test::soon();
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<HttpReply> held;
  std::atomic<int> disconnects = 0;
  uint16_t port = 0;
  HttpServer server;  // last: stops before the rest goes
};

std::string ask(uint16_t port, std::string_view request) {
  RawClient client(port);
  client.send(request);
  return client.read_to_end();
}

std::string get(std::string_view path, std::string_view more = "") {
  return cat("GET ", path, " HTTP/1.1\r\nHost: x\r\n", more, "Connection: close\r\n\r\n");
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

size_t count(const std::string& text, std::string_view part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

/// True as soon as `condition` holds; false after 20 s.
template <class Condition>
bool eventually(Condition condition) {
  const auto end = test::soon();
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

}  // namespace

TEST_CASE("http server: routes, parameters and queries") {
  Fixture f;
  CHECK(ask(f.port, get("/hello")).starts_with("HTTP/1.1 200 OK\r\n"));
  CHECK(has(ask(f.port, get("/items/a%2Fb%20c?q=x+y%21&z")), "\r\n\r\nid=a/b c q=x y!"));
  CHECK(has(ask(f.port, get("http://host:1/items/7")), "id=7 q=-"));
  CHECK(ask(f.port, get("/items/")).starts_with("HTTP/1.1 404 "));
  CHECK(ask(f.port, get("/nowhere")).starts_with("HTTP/1.1 404 "));
  CHECK(ask(f.port, get("/items/%zz")).starts_with("HTTP/1.1 400 "));
  CHECK(ask(f.port, get("/items/%00")).starts_with("HTTP/1.1 400 "));
  const std::string wrong = ask(f.port, "DELETE /hello HTTP/1.1\r\nConnection: close\r\n\r\n");
  CHECK(wrong.starts_with("HTTP/1.1 405 "));
  CHECK(has(wrong, "\r\nAllow: GET\r\n"));
}

TEST_CASE("http server: HEAD has the head of GET, OPTIONS names the methods") {
  Fixture f;
  const std::string head = ask(f.port, "HEAD /hello HTTP/1.1\r\nConnection: close\r\n\r\n");
  CHECK(has(head, "Content-Length: 5\r\n"));
  CHECK(head.ends_with("\r\n\r\n"));
  const std::string options = ask(f.port, "OPTIONS /echo HTTP/1.1\r\nConnection: close\r\n\r\n");
  CHECK(options.starts_with("HTTP/1.1 204 "));
  CHECK(has(options, "Allow: POST\r\n"));
  CHECK(ask(f.port, "OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 204 "));
}

TEST_CASE("http server: errors of handlers are answered") {
  Fixture f;
  const std::string busy = ask(f.port, get("/throw"));
  CHECK(busy.starts_with("HTTP/1.1 409 Conflict\r\n"));
  CHECK(has(busy, "taken — wait"));
  CHECK(ask(f.port, get("/throw-int")).starts_with("HTTP/1.1 500 "));
  CHECK(ask(f.port, get("/forget")).starts_with("HTTP/1.1 500 "));
}

TEST_CASE("http server: on_error shapes every error, before guards every handler, on_done sees every request") {
  HttpServerOptions options;
  std::mutex mutex;
  std::vector<int> done;
  options.on_error = [](const HttpRequest& r, const std::exception& e) {
    const auto* http = dynamic_cast<const HttpError*>(&e);
    return HttpResponse{
        http != nullptr ? http->status() : 418, cat("[", r.path, "] ", std::string_view(e.what())), "text/plain", {}};
  };
  options.on_done = [&](const HttpRequest&, int status, std::chrono::microseconds) {
    const std::lock_guard lock(mutex);
    done.push_back(status);
  };
  HttpServer server(options);
  server.route("GET", "/open", [](const HttpRequest&, std::shared_ptr<HttpReply> reply) { reply->send({}); });
  server.route("GET", "*", [](const HttpRequest& r, std::shared_ptr<HttpReply> reply) {
    reply->send({200, cat("rest ", r.path), "text/plain", {}});
  });
  server.before([](const HttpRequest& r) {
    if (r.header("x-key") != "k") throw Error(Code::denied, "no key");
  });
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  CHECK(ask(port, get("/open", "X-Key: k\r\n")).starts_with("HTTP/1.1 200 "));
  CHECK(has(ask(port, get("/open")), "[/open] no key"));
  CHECK(has(ask(port, get("/a/b/c", "x-key: k\r\n")), "rest /a/b/c"));
  CHECK(ask(port, "PUT /open HTTP/1.1\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 405 "));
  CHECK(ask(port, "nonsense\r\n\r\n").starts_with("HTTP/1.1 400 "));
  server.stop(1s);
  CHECK(done == std::vector<int>{200, 418, 200, 405, 400});
}

TEST_CASE("http server: keep-alive and pipelined requests are answered in order") {
  Fixture f;
  RawClient client(f.port);
  std::string all;
  for (int i = 0; i < 2000; ++i) all += cat("GET /items/", i, " HTTP/1.1\r\nHost: x\r\n\r\n");
  all += get("/items/last");
  std::thread writer([&] { client.send(all); });
  const std::string answers = client.read_to_end();
  writer.join();
  CHECK(count(answers, "HTTP/1.1 200 OK") == 2001);
  size_t at = 0;
  for (int i = 0; i < 2000; ++i) {
    at = answers.find(cat("id=", i, " "), at);
    REQUIRE(at != std::string::npos);
  }
}

TEST_CASE("http server: bytes behind a request that waits neither break nor answer it") {
  Fixture f;
  RawClient client(f.port);
  client.send("GET /hold HTTP/1.1\r\n\r\nG");
  auto reply = f.take_held();
  REQUIRE(reply);
  CHECK(reply->connected());
  client.send("ET /hello HTTP/1.1\r\n\r\n");
  reply->send({200, "first", "text/plain", {}});
  CHECK(has(client.read_until("first"), "first"));
  CHECK(has(client.read_until("hello"), "hello"));
  CHECK(f.disconnects == 0);
}

TEST_CASE("http server: far too many bytes behind a request that waits are thrown away, and its answer is the last") {
  Fixture f;
  RawClient client(f.port);
  client.send("GET /hold HTTP/1.1\r\n\r\n");
  auto reply = f.take_held();
  REQUIRE(reply);
  client.send(std::string(16 << 20, 'x'));  // more than kernels buffer: it is over when most of it was read
  CHECK(f.disconnects == 0);
  reply->send({200, "first", "text/plain", {}});
  CHECK(client.read_to_end().ends_with("first"));
}

TEST_CASE("http server: HTTP/1.0 closes unless asked to keep alive") {
  Fixture f;
  CHECK(has(ask(f.port, "GET /hello HTTP/1.0\r\n\r\n"), "Connection: close\r\n"));
  RawClient client(f.port);
  client.send("GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  CHECK(has(client.read_until("hello"), "Connection: keep-alive\r\n"));
}

TEST_CASE("http server: bodies by length, in chunks, after 100-continue, byte by byte") {
  Fixture f;
  const std::string body(300000, 'b');
  CHECK(ask(f.port, cat("POST /echo HTTP/1.1\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n", body))
            .ends_with("\r\n\r\n" + body));
  CHECK(ask(f.port,
            "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            "5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nTrailer: t\r\n\r\n")
            .ends_with("\r\n\r\nhello world"));
  RawClient waits(f.port);
  waits.send("POST /echo HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n");
  CHECK(waits.read_until("\r\n\r\n") == "HTTP/1.1 100 Continue\r\n\r\n");
  waits.send("data");
  CHECK(waits.read_to_end().ends_with("\r\n\r\ndata"));
  RawClient slow(f.port);
  for (const char c : std::string(
           "\r\nPOST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n")) {
    slow.send(std::string_view(&c, 1));
  }
  CHECK(slow.read_to_end().ends_with("\r\n\r\nabc"));
}

TEST_CASE("http server: limits of head and body") {
  HttpServerOptions options;
  options.max_headers = 4096;
  options.max_body = 1000;
  Fixture f(options);
  CHECK(ask(f.port, get("/hello", cat("X: ", std::string(8000, 'x'), "\r\n"))).starts_with("HTTP/1.1 431 "));
  CHECK(ask(f.port, get(cat("/", std::string(8000, 'x')))).starts_with("HTTP/1.1 431 "));
  RawClient endless(f.port);  // a head without an end
  endless.send(std::string(8000, 'x'));
  CHECK(endless.read_to_end().starts_with("HTTP/1.1 4"));
  CHECK(ask(f.port, "POST /echo HTTP/1.1\r\nContent-Length: 1001\r\n\r\n").starts_with("HTTP/1.1 413 "));
  CHECK(ask(f.port, cat("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n", std::string(1024, 'x'),
                        "\r\n0\r\n\r\n"))
            .starts_with("HTTP/1.1 413 "));
  CHECK(
      ask(f.port, "POST /echo HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n").starts_with("HTTP/1.1 4"));
  CHECK(ask(f.port, "POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n").starts_with("HTTP/1.1 400 "));
  // The answer arrives although the body still does.
  RawClient sender(f.port);
  sender.send("POST /echo HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n");
  std::thread writer([&] {
    try {
      sender.send(std::string(3000000, 'x'));
    } catch (const Error&) {
    }
  });
  CHECK(sender.read_until("\r\n\r\n").starts_with("HTTP/1.1 413 "));
  writer.join();
}

TEST_CASE("http server: invalid bytes are answered with 400 or closed, never worse") {
  Fixture f;
  std::mt19937 random(53);
  for (int round = 0; round < 300; ++round) {
    std::string bytes = round % 3 == 0   ? "GET /hello HTTP/1.1\r\n"
                        : round % 3 == 1 ? "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
                                         : "";
    const size_t n = random() % 200;
    for (size_t i = 0; i < n; ++i) bytes += static_cast<char>(random());
    RawClient client(f.port);
    client.send(bytes);
    client.half_close();
    const std::string answer = client.read_to_end();
    CHECK((answer.empty() || answer.starts_with("HTTP/1.")));
  }
  CHECK(ask(f.port, get("/hello")).ends_with("hello"));
}

TEST_CASE("http server: slow heads and bodies end with 408, silent connections are closed") {
  HttpServerOptions options;
  options.header_timeout = 1s;
  options.body_timeout = 1s;
  options.idle_timeout = 1s;
  Fixture f(options);
  RawClient head(f.port), body(f.port), silent(f.port), idle(f.port);
  head.send("GET /hello HTTP/1.1\r\nX-");
  body.send("POST /echo HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc");
  idle.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(head.read_to_end().starts_with("HTTP/1.1 408 "));
  CHECK(body.read_to_end().starts_with("HTTP/1.1 408 "));
  CHECK(silent.read_to_end().empty());
  CHECK(has(idle.read_to_end(), "hello"));
}

TEST_CASE("http server: a client that leaves is seen while its request waits") {
  Fixture f;
  SUBCASE("closed") {
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\n");
    auto reply = f.take_held();
    CHECK(f.disconnects == 0);
    client.close();
    CHECK(f.wait_for_disconnects(1));
    CHECK_FALSE(reply->connected());
    reply->send({});  // ignored
  }
  SUBCASE("half closed") {
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\n");
    auto reply = f.take_held();
    client.half_close();
    CHECK(f.wait_for_disconnects(1));
  }
  SUBCASE("closed behind pipelined bytes") {
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\nGET /hello HTTP/1.1\r\n\r\n");
    auto reply = f.take_held();
    client.close();
    CHECK(f.wait_for_disconnects(1));
  }
  SUBCASE("closed behind more bytes than are kept") {
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\n");
    auto reply = f.take_held();
    client.send(std::string(1 << 20, 'x'));
    CHECK(f.disconnects == 0);
    client.close();
    CHECK(f.wait_for_disconnects(1));
  }
  SUBCASE("callback set after the client has left") {
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\n");
    auto reply = f.take_held();
    client.close();
    CHECK(f.wait_for_disconnects(1));
    reply->on_disconnect([&] { f.disconnects.fetch_add(1); });
    CHECK(f.wait_for_disconnects(2));
  }
  SUBCASE("in a stream") {
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\n");
    auto reply = f.take_held();
    reply->start_stream(200, "text/event-stream");
    CHECK(reply->write("data: 1\n\n"));
    client.read_until("data: 1");
    client.close();
    CHECK(f.wait_for_disconnects(1));
    CHECK_FALSE(reply->write("data: 2\n\n"));
  }
}

TEST_CASE("http server: streams are chunked, chunks stay whole, from many threads") {
  Fixture f;
  RawClient client(f.port);
  client.send("GET /hold HTTP/1.1\r\nConnection: close\r\n\r\n");
  auto reply = f.take_held();
  reply->start_stream(200, "text/event-stream", {{"X-A", "b\r\nInjected: 1"}});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) reply->write(std::string(1000, static_cast<char>('a' + t)));
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(reply->write(""));  // would end the stream if it were sent
  reply->finish();
  CHECK_FALSE(reply->write("late"));
  const std::string answer = client.read_to_end();
  CHECK(has(answer, "Transfer-Encoding: chunked\r\n"));
  CHECK_FALSE(has(answer, "\r\nInjected"));
  CHECK(count(answer, cat("3e8\r\n", std::string(1000, 'c'), "\r\n")) == 200);
  CHECK(answer.ends_with("\r\n0\r\n\r\n"));
  CHECK(f.disconnects == 0);
}

TEST_CASE("http server: a stream dropped without an end is cut, HTTP/1.0 streams end with the connection") {
  Fixture f;
  RawClient cut(f.port), old(f.port);
  cut.send("GET /hold HTTP/1.1\r\n\r\n");
  auto reply = f.take_held();
  reply->start_stream(200, "text/plain");
  reply->write("part");
  reply.reset();
  const std::string answer = cut.read_to_end();
  CHECK(answer.ends_with("4\r\npart\r\n"));
  old.send("GET /hold HTTP/1.0\r\n\r\n");
  reply = f.take_held();
  reply->start_stream(200, "text/plain");
  reply->write("plain");
  reply->finish();
  CHECK(old.read_to_end().ends_with("\r\n\r\nplain"));
}

TEST_CASE("http server: a client that never reads is cut off at the backlog limit") {
  HttpServerOptions options;
  options.max_backlog = 100000;
  Fixture f(options);
  RawClient client(f.port);
  client.send("GET /hold HTTP/1.1\r\n\r\n");
  auto reply = f.take_held();
  reply->start_stream(200, "text/plain");
  size_t sent = 0;
  while (reply->write(std::string(10000, 'x')) && sent < 1u << 30) sent += 10000;
  CHECK(sent < 1u << 30);
  CHECK(f.wait_for_disconnects(1));
  CHECK(eventually([&] { return f.server.connections() == 0; }));
}

TEST_CASE("http server: thousands of idle connections and one request; connections beyond the limit get 503") {
  raise_descriptor_limit();
  HttpServerOptions options;
  options.max_connections = 2001;
  Fixture f(options);
  const uint64_t before = resident_bytes(::getpid());
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 2000; ++i) idle.push_back(connect_tcp("127.0.0.1", f.port, test::soon()));
  CHECK(eventually([&] { return f.server.connections() == 2000; }));
  RawClient client(f.port);
  client.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(has(client.read_until("hello"), "hello"));
  CHECK(ask(f.port, get("/hello")).starts_with("HTTP/1.1 503 "));
  CHECK(resident_bytes(::getpid()) - before < 40u << 20);
  idle.clear();
  CHECK(eventually([&] { return f.server.connections() == 1; }));
}

TEST_CASE("http server: unix sockets carry the credentials of the peer; the file goes with the server") {
  const test::TempDir folder;
  const std::string path = folder / "server.sock";
  {
    Fixture f;
    f.server.listen_unix(path, 0600);
    RawClient client(connect_unix(path));
    client.send(get("/peer"));
    CHECK(has(client.read_to_end(), cat("\r\n\r\nunix ", ::getpid(), " ", ::getuid())));
    CHECK(has(ask(f.port, get("/peer")), "\r\n\r\n127.0.0.1:"));
    HttpServer second({});
    CHECK_THROWS_AS(second.listen_unix(path, 0600), Error);
    CHECK_THROWS_AS(second.listen_tcp("127.0.0.1", f.port), Error);
  }
  CHECK(::access(path.c_str(), F_OK) != 0);
}

TEST_CASE("http server: stop closes idle connections, waits for answers, then cuts what is left") {
  Fixture f;
  RawClient idle(f.port), answered(f.port), streaming(f.port);
  idle.send("GET /hello HTTP/1.1\r\n\r\n");
  idle.read_until("hello");
  answered.send("GET /hold HTTP/1.1\r\n\r\n");
  auto first = f.take_held();
  streaming.send("GET /hold HTTP/1.1\r\n\r\n");
  auto second = f.take_held();
  second->start_stream(200, "text/plain");
  auto stopped = std::async(std::launch::async, [&] { f.server.stop(500ms); });
  CHECK(idle.read_to_end().empty());
  first->send({200, "in time", "text/plain", {}});
  const std::string answer = answered.read_to_end();
  CHECK(answer.ends_with("in time"));
  CHECK(has(answer, "Connection: close"));
  stopped.get();
  CHECK_FALSE(has(streaming.read_to_end(), "\r\n0\r\n\r\n"));
  CHECK(f.disconnects == 1);
  CHECK_FALSE(second->write("x"));
  second->on_disconnect([&] { f.disconnects.fetch_add(1); });
  CHECK(f.disconnects == 2);
  CHECK(f.server.connections() == 0);
  CHECK_THROWS_AS(RawClient(f.port), Error);
}

TEST_CASE("http server: replies may outlive the server, servers need not be started") {
  std::shared_ptr<HttpReply> reply;
  std::string text;
  {
    Fixture f;
    RawClient client(f.port);
    client.send("GET /hold HTTP/1.1\r\n\r\n");
    reply = f.take_held();
  }
  CHECK_FALSE(reply->connected());
  reply->send({});
  reply.reset();
  HttpServer never({});
  never.listen_tcp("127.0.0.1", 0);
  never.every(1h, [] {});
}

TEST_CASE("http server: periodic tasks run until stop, also after one of them throws; several threads") {
  HttpServerOptions options;
  options.threads = 4;
  Fixture f(options);
  std::atomic<int> runs = 0;
  f.server.every(1ms, [&] {
    if (runs.fetch_add(1) == 1) throw Error(Code::internal, "on purpose");
  });
  CHECK(eventually([&] { return runs > 3; }));
  std::vector<std::thread> clients;
  std::atomic<int> good = 0;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&] {
      for (int i = 0; i < 100; ++i) good += ask(f.port, get("/hello")).ends_with("hello") ? 1 : 0;
    });
  }
  for (auto& client : clients) client.join();
  CHECK(good == 800);
  f.server.stop(1s);
  const int after = runs;
  std::this_thread::sleep_for(20ms);
  CHECK(runs == after);
}

TEST_CASE("http server: running out of descriptors neither spins nor stops accepting for ever") {
  Fixture f;
  RawClient first(f.port);
  first.send("GET /hello HTTP/1.1\r\n\r\n");
  first.read_until("hello");
  // Connected before the descriptors run out; accepted after they are back.
  RawClient second(f.port);
  CHECK(eventually([&] { return f.server.connections() == 2; }));
  UniqueFd third(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::vector<UniqueFd> hoard;
  while (true) {
    UniqueFd fd(::dup(first.fd()));
    if (!fd || hoard.size() > 100000) break;
    hoard.push_back(std::move(fd));
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(f.port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::connect(third.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  second.send("GET /hello HTTP/1.1\r\n\r\n");
  CHECK(has(second.read_until("hello"), "hello"));
  CHECK(f.server.connections() == 2);
  hoard.clear();
  RawClient client(std::move(third));
  client.send(get("/hello"));
  CHECK(client.read_to_end().ends_with("hello"));
}
