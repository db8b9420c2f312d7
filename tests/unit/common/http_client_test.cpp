#include "common/http_client.h"

#include <random>
#include <thread>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/http_server.h"
#include "common/strings.h"
#include "http_fixture.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace std::chrono_literals;

namespace {

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

void add_routes(HttpServer& server) {
  const auto describe = [](const HttpRequest& r, std::shared_ptr<HttpReply> reply) {
    reply->send({200,
                 cat(r.method, " ", r.target, " ", r.header("host"), " ", r.header("authorization"), " ", r.body),
                 "text/plain",
                 {{"X-A", "1"}}});
  };
  for (const char* method : {"GET", "POST", "PUT", "DELETE", "PATCH"}) server.route(method, "/it", describe);
  server.route("GET", "/busy",
               [](const HttpRequest&, std::shared_ptr<HttpReply>) { throw Error(Code::busy, "taken"); });
  server.route("GET", "/stream", [](const HttpRequest&, std::shared_ptr<HttpReply> reply) {
    reply->start_stream(200, "text/event-stream");
    for (int i = 0; i < 100; ++i) reply->write(cat("data: ", i, "\n\n"));
    reply->finish();
  });
  server.route("GET", "/cut", [](const HttpRequest&, std::shared_ptr<HttpReply> reply) {
    reply->start_stream(200, "text/plain");
    reply->write("begin");
  });
}

using Events = std::vector<std::pair<std::string, std::string>>;

Events events_of(const std::string& text, size_t piece) {
  Events events;
  SseParser parser([&](std::string_view name, std::string_view data) { events.emplace_back(name, data); });
  for (size_t i = 0; i < text.size(); i += piece) parser.feed(std::string_view(text).substr(i, piece));
  return events;
}

}  // namespace

TEST_CASE("http client: methods, bodies, headers, errors as answers, kept connections") {
  HttpServer server({});
  add_routes(server);
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  HttpClient client(cat("http://127.0.0.1:", port), "key");
  const HttpAnswer got = client.request("GET", "/it?a=%2F");
  CHECK(got.status == 200);
  CHECK(got.body == cat("GET /it?a=%2F 127.0.0.1:", port, " Bearer key "));
  CHECK(std::find(got.headers.begin(), got.headers.end(), std::pair<std::string, std::string>("X-A", "1")) !=
        got.headers.end());
  for (const char* method : {"POST", "PUT", "DELETE", "PATCH"}) {
    CHECK(client.request(method, "/it", "body").body == cat(method, " /it 127.0.0.1:", port, " Bearer key body"));
  }
  CHECK(client.request("POST", "/it").status == 200);
  CHECK(client.request("GET", "/busy").status == 409);
  CHECK(client.request("GET", "/none").status == 404);
  CHECK(server.connections() == 1);
  error_of([&] { client.request("GET", "it"); }, Code::usage);
  CHECK_THROWS_AS(client.request("GET", "/a b\r\nX: y"), Error);
}

TEST_CASE("http client: unix sockets") {
  const test::TempDir folder;
  HttpServer server({});
  add_routes(server);
  server.listen_unix(folder / "s.sock", 0600);
  server.start();
  HttpClient client("unix:" + (folder / "s.sock"));
  CHECK(client.request("POST", "/it", "x").body == "POST /it localhost  x");
  std::string all;
  CHECK(client
            .stream("GET", "/stream", "",
                    [&](std::string_view chunk) {
                      all += chunk;
                      return true;
                    })
            .status == 200);
  CHECK(all.ends_with("data: 99\n\n"));
  server.stop(1s);
  CHECK_FALSE(error_of([&] { client.request("GET", "/it"); }, Code::unavailable).empty());
}

TEST_CASE("http client: streams, stopped, cut, thrown out of") {
  HttpServer server({});
  add_routes(server);
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  HttpClient client(cat("http://127.0.0.1:", port));
  Events events;
  SseParser parser([&](std::string_view name, std::string_view data) { events.emplace_back(name, data); });
  client.stream("GET", "/stream", "", [&](std::string_view chunk) {
    parser.feed(chunk);
    return true;
  });
  CHECK(events.size() == 100);
  int chunks = 0;
  CHECK(client.stream("GET", "/stream", "", [&](std::string_view) { return ++chunks < 1; }).status == 200);
  CHECK(chunks == 1);
  CHECK(error_of([&] { client.stream("GET", "/cut", "", [](std::string_view) { return true; }); }, Code::peer_lost)
            .find("ended early") != std::string::npos);
  CHECK_THROWS_AS(
      client.stream("GET", "/stream", "", [](std::string_view) -> bool { throw Error(Code::internal, "mine"); }),
      Error);
  std::string streamed;
  const HttpAnswer refused = client.stream("GET", "/none", "", [&](std::string_view chunk) {
    streamed += chunk;
    return true;
  });
  CHECK(refused.status == 404);
  CHECK(refused.body.find("no such path") != std::string::npos);
  CHECK(streamed.empty());
}

TEST_CASE("http client: nobody there, silence, broken answers") {
  uint16_t port = 0;
  {
    const UniqueFd closed = listen_tcp("127.0.0.1", 0);
    port = local_port(closed.get());
  }
  HttpClient nobody(cat("http://127.0.0.1:", port));
  CHECK(error_of([&] { nobody.request("GET", "/"); }, Code::unavailable).find(cat("http://127.0.0.1:", port)) !=
        std::string::npos);

  const UniqueFd listener = listen_tcp("127.0.0.1", 0);
  HttpClient silent(cat("http://127.0.0.1:", local_port(listener.get())));
  silent.set_timeout(1s, 100ms);
  CHECK_FALSE(error_of([&] { silent.request("GET", "/"); }, Code::stalled).empty());

  const UniqueFd first = accept_until(listener.get(), test::soon());  // of the silent request
  HttpClient puzzled(cat("http://127.0.0.1:", local_port(listener.get())));
  std::thread server([&] {
    test::RawClient peer(accept_until(listener.get(), test::soon()));
    peer.read_until("\r\n\r\n");
    peer.send("what?\r\n\r\n");
  });
  CHECK_FALSE(error_of([&] { puzzled.request("POST", "/"); }, Code::unavailable).empty());
  server.join();
}

TEST_CASE("http client: a restarted server is found again") {
  const test::TempDir folder;
  HttpClient client("unix:" + (folder / "s.sock"));
  for (int i = 0; i < 3; ++i) {
    HttpServer server({});
    add_routes(server);
    server.listen_unix(folder / "s.sock", 0600);
    server.start();
    CHECK(client.request("GET", "/it").status == 200);
    CHECK(client.request("POST", "/it", "x").status == 200);
  }
}

TEST_CASE("http client: endpoints") {
  for (const char* bad : {"", "unix:", "127.0.0.1:80", "https://h", "http://", "http://h:0", "http://h:x",
                          "http://[::1", "http://a/b", "http://a b"}) {
    CAPTURE(bad);
    CHECK_FALSE(error_of([&] { HttpClient client(bad); }, Code::usage).empty());
  }
  HttpClient good("http://[::1]:1/");
  CHECK_THROWS_AS(HttpClient("http://h", "a\r\nb"), Error);
}

TEST_CASE("sse: events whatever the pieces and line ends") {
  const std::string text =
      ": comment\ndata: one\n\nevent: add\ndata:two\ndata:  three\nid: 7\n\r\nevent: none\n\ndata\r\rdata: "
      "\xc3\xa9\r\n\r\ndata: unfinished\n";
  const Events expected = {{"message", "one"}, {"add", "two\n three"}, {"message", ""}, {"message", "\xc3\xa9"}};
  for (size_t piece = 1; piece <= text.size(); ++piece) CHECK(events_of(text, piece) == expected);
}

TEST_CASE("sse: endless events are refused") {
  SseParser parser([](std::string_view, std::string_view) {});
  const std::string line = cat("data: ", std::string(1 << 20, 'x'), "\n");
  CHECK_THROWS_AS(
      [&] {
        for (int i = 0; i < 100; ++i) parser.feed(line);
      }(),
      Error);
}
