// Ranks that die while clients wait.
#include <doctest/doctest.h>

#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

const std::string kBody = R"({"prompt":"Count","max_tokens":50,"seed":3,"stream":true})";

struct Client {
  Client(Server& server, const std::string& body)
      : thread([this, &server, body] {
          try {
            answer = server.post("/v1/completions", body);
          } catch (const glm53::Error& e) {
            answer.body = e.what();
          }
        }) {}
  ~Client() { join(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  void join() {
    if (thread.joinable()) thread.join();
  }
  std::string text() {
    join();
    std::string out;
    for (const Json& e : events_of(answer.body)) out += e["choices"][0]["text"].get<std::string>();
    return out;
  }
  glm53::HttpAnswer answer;
  std::thread thread;
};

}  // namespace

TEST_CASE("a request outlives a rank: emitted tokens are resubmitted, not repeated to the client") {
  Server server;
  auto first = std::make_unique<FakeRank>(server.rank_socket(), 1);
  server.wait_ready();
  Client client(server, kBody);
  const wire::Submit s = first->submitted();
  const auto ids = tiny().encode(" one two three four");
  REQUIRE(ids.size() >= 4);
  first->tokens(s.id, 0, {ids[0], ids[1]});
  // What the journal holds when the rank dies is what it will replay.
  REQUIRE(eventually([&] {
    return server.get("/metrics")
               .body.find("glm53_generation_tokens_total{engine=\"0\",model_name=\"glm53-tiny\"} 2") !=
           std::string::npos;
  }));
  first.reset();
  REQUIRE(eventually([&] { return server.get("/health").status == 503; }));

  FakeRank second(server.rank_socket(), 2, "model-a", false);
  REQUIRE(eventually([&] { return server.get("/health").status == 200; }));
  CHECK(second.submits_waiting() == 0);  // its gate is closed
  second.stats(true);
  const wire::Submit again = second.submitted();
  CHECK(again.id == s.id);
  CHECK(again.prompt == s.prompt);
  CHECK(again.seed == s.seed);
  CHECK(again.sampling == s.sampling);
  CHECK(again.emitted == std::vector<int32_t>{ids[0], ids[1]});
  // A rank that repeats tokens does not confuse the client.
  second.tokens(again.id, 0, {ids[0], ids[1], ids[2]});
  for (uint32_t i = 3; i < ids.size(); ++i) second.tokens(again.id, i, {ids[i]});
  second.end(again.id, static_cast<uint32_t>(ids.size()), -1);
  CHECK(client.text() == " one two three four");
}

TEST_CASE("new requests wait while a rank restarts") {
  Server server;
  auto first = std::make_unique<FakeRank>(server.rank_socket(), 1);
  server.wait_ready();
  first.reset();
  REQUIRE(eventually([&] { return server.get("/health").status == 503; }));
  Client client(server, kBody);
  REQUIRE(eventually([&] { return (*server).unfinished() == 1; }));
  FakeRank second(server.rank_socket(), 2, "model-b");
  second.answer(second.submitted(), " here", -1);
  CHECK(client.text() == " here");
}

TEST_CASE("a request present at two deaths is answered 500") {
  Server server;
  for (uint64_t generation = 1; generation <= 2; ++generation) {
    static std::unique_ptr<Client> client;
    FakeRank rank(server.rank_socket(), generation);
    server.wait_ready();
    if (generation == 1) {
      client = std::make_unique<Client>(server, R"({"prompt":"poison"})");
      rank.submitted();
      continue;
    }
    rank.submitted();
    rank.die();
    client->join();
    CHECK(client->answer.status == 500);
    CHECK(client->answer.body.find("died twice") != std::string::npos);
    client.reset();
  }
}

TEST_CASE("another model does not continue a request") {
  Server server;
  auto first = std::make_unique<FakeRank>(server.rank_socket(), 1, "model-a");
  server.wait_ready();
  Client client(server, R"({"prompt":"x"})");
  first->submitted();
  first.reset();
  FakeRank second(server.rank_socket(), 2, "model-b");
  client.join();
  CHECK(client.answer.status == 503);
  CHECK(client.answer.body.find("model was changed") != std::string::npos);
}

TEST_CASE("a newer generation takes the place of an older one, not the other way") {
  Server server;
  FakeRank old(server.rank_socket(), 5);
  server.wait_ready();
  FakeRank newer(server.rank_socket(), 6);
  const auto generation = [&] { return glm53::parse_json(server.get("/health").body)["generation"].get<int>(); };
  CHECK(eventually([&] { return generation() == 6; }));
  {
    FakeRank stale(server.rank_socket(), 4);
    Client client(server, kBody);
    newer.answer(newer.submitted(), " hello", -1);
    CHECK(client.text() == " hello");
    CHECK(stale.submits_waiting() == 0);
  }
  CHECK(generation() == 6);
}

TEST_CASE("garbage on the rank socket ends that connection only") {
  Server server;
  {
    const glm53::UniqueFd fd = glm53::connect_unix(server.rank_socket());
    const std::string garbage = "\x05\x00\x00\x00\xFFhello";
    glm53::send_all(fd.get(), std::as_bytes(std::span(garbage)));
  }
  {
    FakeRank rank(server.rank_socket());
    server.wait_ready();
    rank.send(wire::Cancel{1, std::nullopt});  // a frame that only the API process may send
    CHECK(eventually([&] { return server.get("/health").status == 503; }));
  }
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  Client client(server, kBody);
  rank.answer(rank.submitted(), " fine", -1);
  CHECK(client.text() == " fine");
}

TEST_CASE("silent streams get comments") {
  Server server(Overrides{{"api.keepalive", "100ms"}});
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  std::string body;
  std::atomic<bool> commented{false};
  std::thread client([&] {
    glm53::HttpClient http(server.url());
    http.set_timeout(kSoon, kSoon);
    http.stream("POST", "/v1/completions", kBody, [&](std::string_view chunk) {
      body += chunk;
      if (body.find(": ping\n\n") != std::string::npos) commented = true;
      return true;
    });
  });
  const wire::Submit s = rank.submitted();
  CHECK(eventually([&] { return commented.load(); }));
  rank.answer(s, " late", -1);
  client.join();
  std::string text;
  for (const Json& e : events_of(body)) text += e["choices"][0]["text"].get<std::string>();
  CHECK(text == " late");
}

TEST_CASE("stopping answers those who wait") {
  std::unique_ptr<Client> client;
  {
    Server server;
    FakeRank rank(server.rank_socket());
    server.wait_ready();
    client = std::make_unique<Client>(server, R"({"prompt":"x"})");
    rank.submitted();
    (*server).drain();
    CHECK(server.post("/v1/completions", R"({"prompt":"y"})").status == 503);
    (*server).stop(std::chrono::milliseconds(0));
    client->join();
  }
  CHECK(client->answer.status != 200);
}
