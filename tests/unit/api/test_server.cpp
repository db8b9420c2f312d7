// A whole API process in this one: real HTTP on loopback, a fake rank on its socket.
#include <fstream>

#include <doctest/doctest.h>

#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

std::string chat_body(const std::string& more = "") {
  return R"({"messages":[{"role":"user","content":"Hi"}])" + (more.empty() ? "" : "," + more) + "}";
}

/// A request in a thread of its own.
class Background {
 public:
  Background(Server& server, std::string path, std::string body)
      : thread_([this, &server, path = std::move(path), body = std::move(body)] {
          try {
            answer_ = server.post(path, body);
          } catch (const glm53::Error& e) {
            answer_.body = e.what();
          }
        }) {}
  ~Background() {
    if (thread_.joinable()) thread_.join();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  const glm53::HttpAnswer& answer() {
    if (thread_.joinable()) thread_.join();
    return answer_;
  }
  Json json() { return glm53::parse_json(answer().body); }

 private:
  glm53::HttpAnswer answer_;
  std::thread thread_;
};

int error_code(const glm53::HttpAnswer& answer) {
  const Json error = glm53::parse_json(answer.body)["error"];
  CHECK(error["message"].get<std::string>().size() > 3);
  CHECK(error["code"] == answer.status);
  return answer.status;
}

}  // namespace

TEST_CASE("a plain chat answer") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  Background client(server, "/v1/chat/completions", chat_body(R"("seed":5,"mystery":1)"));
  const wire::Submit s = rank.submitted();
  CHECK(tiny().decode(s.prompt) == "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>");
  CHECK(s.seed == 5);
  CHECK(s.sampling.temperature == 1);
  CHECK(s.sampling.top_p == doctest::Approx(0.95));
  CHECK(s.sampling.max_tokens == 4096 - static_cast<int32_t>(s.prompt.size()));
  CHECK(s.boundaries.size() == 2);
  rank.answer(s, "Thinking.</think>\n\nHello there!");
  const Json body = client.json();
  CHECK(client.answer().status == 200);
  CHECK(body["model"] == "glm53-tiny");
  CHECK(body["id"].get<std::string>().starts_with("chatcmpl-"));
  const Json& choice = body["choices"][0];
  CHECK(choice["message"]["content"] == "Hello there!");
  CHECK(choice["message"]["reasoning"] == "Thinking.");
  CHECK(choice["finish_reason"] == "stop");
  CHECK(choice["stop_reason"] == 2631);
  CHECK(body["usage"]["prompt_tokens"] == s.prompt.size());
  CHECK(body["usage"]["completion_tokens"] == tiny().encode("Thinking.</think>\n\nHello there!").size() + 1);
  CHECK(body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3);
  CHECK(header(client.answer(), "x-glm53-ignored") == "mystery");
  CHECK(header(client.answer(), "x-request-id").size() == 32);
  CHECK((*server).unfinished() == 0);
}

TEST_CASE("a chat stream has its events in order") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  Background client(server, "/v1/chat/completions",
                    chat_body(R"("stream":true,"stream_options":{"include_usage":true})"));
  rank.answer(rank.submitted(), "So.</think>Caf\xC3\xA9!");
  bool done = false;
  const auto events = events_of(client.answer().body, &done);
  CHECK(done);
  CHECK(header(client.answer(), "content-type") == "text/event-stream; charset=utf-8");
  REQUIRE(events.size() > 4);
  CHECK(events.front()["choices"][0]["delta"] == Json({{"role", "assistant"}, {"content", ""}}));
  std::string reasoning, content;
  int finishes = 0;
  for (size_t i = 1; i + 1 < events.size(); ++i) {
    const Json& choice = events[i]["choices"][0];
    CHECK(events[i]["id"] == events.front()["id"]);
    CHECK(events[i]["usage"].is_null());
    const Json& delta = choice["delta"];
    if (delta.contains("reasoning")) {
      CHECK(content.empty());
      reasoning += delta["reasoning"].get<std::string>();
      CHECK(delta["reasoning"] == delta["reasoning_content"]);
    }
    if (delta.contains("content")) content += delta["content"].get<std::string>();
    finishes += !choice["finish_reason"].is_null();
  }
  CHECK(reasoning == "So.");
  CHECK(content == "Caf\xC3\xA9!");
  CHECK(finishes == 1);
  CHECK(events[events.size() - 2]["choices"][0]["finish_reason"] == "stop");
  CHECK(events.back()["choices"].empty());
  CHECK(events.back()["usage"]["completion_tokens_details"]["reasoning_tokens"] == tiny().encode("So.").size());
}

TEST_CASE("two streams at the same time keep apart") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  Background a(server, "/v1/completions", R"({"prompt":"aaa","stream":true})");
  const wire::Submit sa = rank.submitted();
  Background b(server, "/v1/completions", R"({"prompt":"bbb","stream":true})");
  const wire::Submit sb = rank.submitted();
  const auto one = tiny().encode(" one two three"), other = tiny().encode(" four five six");
  for (uint32_t i = 0; i < std::max(one.size(), other.size()); ++i) {
    if (i < one.size()) rank.tokens(sa.id, i, {one[i]});
    if (i < other.size()) rank.tokens(sb.id, i, {other[i]});
  }
  rank.end(sa.id, static_cast<uint32_t>(one.size()), -1);
  rank.end(sb.id, static_cast<uint32_t>(other.size()), -1);
  const auto text = [](const std::string& body) {
    std::string out;
    for (const Json& e : events_of(body)) out += e["choices"][0]["text"].get<std::string>();
    return out;
  };
  CHECK(text(a.answer().body) == " one two three");
  CHECK(text(b.answer().body) == " four five six");
}

TEST_CASE("completions: several prompts and choices, echo, stop strings, log-probabilities") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  Background many(server, "/v1/completions", R"({"prompt":["A","B"],"n":2,"echo":true,"seed":10,"max_tokens":7})");
  std::vector<wire::Submit> submits;
  for (int i = 0; i < 4; ++i) submits.push_back(rank.submitted());
  CHECK(submits[0].seed == 10);
  CHECK(submits[1].seed == 11);
  CHECK(submits[3].seed == 11);
  CHECK(submits[2].sampling.max_tokens == 7);
  for (int i = 3; i >= 0; --i) rank.answer(submits[static_cast<size_t>(i)], "x" + std::to_string(i), -1);
  const Json body = many.json();
  REQUIRE(body["choices"].size() == 4);
  CHECK(body["choices"][0]["text"] == "Ax0");
  CHECK(body["choices"][3]["text"] == "Bx3");
  CHECK(body["choices"][3]["finish_reason"] == "length");
  CHECK(body["usage"]["prompt_tokens"] == 2);

  Background stop(server, "/v1/completions", R"({"prompt":"A","stop":["lo w"],"max_tokens":50})");
  const wire::Submit s = rank.submitted();
  const auto ids = tiny().encode("Hello world again");
  for (uint32_t i = 0; i < ids.size(); ++i) rank.tokens(s.id, i, {ids[i]});
  CHECK(stop.json()["choices"][0]["text"] == "Hel");
  CHECK(stop.json()["choices"][0]["stop_reason"] == "lo w");
  const wire::Cancel cancel = rank.cancelled();
  CHECK(cancel.id == s.id);
  REQUIRE(cancel.keep_tokens.has_value());
  CHECK(*cancel.keep_tokens < ids.size());

  Background echo(server, "/v1/completions", R"({"prompt":"Only this","echo":true,"max_tokens":0})");
  CHECK(echo.json()["choices"][0]["text"] == "Only this");
}

TEST_CASE("a client that leaves is cancelled, streamed or not, running or queued") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  for (const std::string more : {"", "\"stream\":true"}) {
    RawClient queued(server.port(), "/v1/chat/completions", chat_body(more));
    const wire::Submit s = rank.submitted();
    queued.close();
    CHECK(rank.cancelled().id == s.id);
    RawClient running(server.port(), "/v1/chat/completions", chat_body(more));
    const wire::Submit t = rank.submitted();
    rank.tokens(t.id, 0, {1, 2, 3});
    running.close();
    CHECK(rank.cancelled().id == t.id);
  }
  CHECK(eventually([&] { return (*server).unfinished() == 0; }));
}

TEST_CASE("a client that never reads is dropped and cancelled") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  RawClient client(server.port(), "/v1/completions", R"({"prompt":"x","stream":true,"max_tokens":4000})");
  const wire::Submit s = rank.submitted();
  // More than the kernel and the server together hold for one client.
  std::atomic<bool> cancelled{false};
  std::thread watch([&] { cancelled = rank.cancelled().id == s.id; });
  const std::vector<int32_t> step(200, tiny().encode("!").front());
  for (uint32_t i = 0; i < 200000 && !cancelled; ++i) rank.tokens(s.id, i * 200, step);
  watch.join();
  CHECK(cancelled);
}

TEST_CASE("errors have one shape and the right status") {
  Server server({{"api.max_body", "10KiB"}, {"sched.max_queue", "1"}});
  CHECK(error_code(server.post("/v1/chat/completions", chat_body())) == 503);  // no rank so far
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  CHECK(error_code(server.get("/nothing")) == 404);
  CHECK(error_code(server.get("/v1/chat/completions")) == 405);
  CHECK(error_code(server.get("/v1/models/other")) == 404);
  const std::string path = "/v1/chat/completions";
  CHECK(error_code(server.post(path, "{")) == 400);
  CHECK(error_code(server.post(path, "[]")) == 400);
  CHECK(error_code(server.post(path, "")) == 400);
  CHECK(error_code(server.post(path, "{\"messages\":[{\"role\":\"user\",\"content\":\"\xFF\"}]}")) == 400);
  CHECK(error_code(server.post(path, chat_body(R"("temperature":9)"))) == 400);
  CHECK(error_code(server.post(path, chat_body(R"("model":"other")"))) == 404);
  CHECK(error_code(server.post(path, chat_body(R"("max_tokens":5000)"))) == 400);
  CHECK(error_code(server.post(path, std::string(20000, ' '))) == 413);
  CHECK(error_code(glm53::HttpClient(server.url()).request("POST", path, chat_body(), "text/plain")) == 400);
  // Four sequences run on the rank, one may wait.
  std::vector<std::unique_ptr<RawClient>> held;
  for (int i = 0; i < 5; ++i) {
    held.push_back(std::make_unique<RawClient>(server.port(), path, chat_body()));
    rank.submitted();
  }
  const auto full = server.post(path, chat_body());
  CHECK(error_code(full) == 429);
  CHECK(header(full, "retry-after") == "1");
}

TEST_CASE("keys guard everything but health, readiness and version") {
  TempDir secrets;
  { std::ofstream(secrets / "keys") << "alice:sesame\nopen-up\n"; }
  std::filesystem::permissions(secrets / "keys", std::filesystem::perms::owner_read);
  Server server(Overrides{{"api.key_file", secrets / "keys"}});
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  for (const char* path : {"/health", "/ready", "/version", "/ping"}) CHECK(server.get(path).status == 200);
  for (const char* path : {"/v1/models", "/metrics", "/load"}) {
    const auto answer = server.get(path);
    CHECK(error_code(answer) == 401);
    CHECK(header(answer, "www-authenticate") == "Bearer");
    CHECK(glm53::HttpClient(server.url(), "sesame").request("GET", path).status == 200);
    CHECK(glm53::HttpClient(server.url(), "sesam").request("GET", path).status == 401);
  }
  CHECK(server.post("/v1/chat/completions", chat_body(), "wrong").status == 401);
  CHECK(server.post("/tokenize", R"({"prompt":"x"})", "open-up").status == 200);
}

TEST_CASE("the gate, draining and the canary") {
  Server server;
  CHECK(server.admin("gate_close")["ok"] == true);
  FakeRank rank(server.rank_socket(), 7, "model-a", false);
  REQUIRE(eventually([&] { return server.get("/health").status == 200; }));
  const Json health = glm53::parse_json(server.get("/health").body);
  CHECK(health["generation"] == 7);
  CHECK(health["ready"] == false);
  CHECK(health.contains("progress_age_ms"));
  CHECK(health["peers"]["others"] == true);
  CHECK(server.get("/ready").status == 503);
  CHECK(error_code(server.post("/v1/chat/completions", chat_body())) == 503);
  CHECK(server.get("/v1/models").status == 200);

  std::thread canary_rank([&] {
    const wire::Submit s = rank.submitted();
    CHECK(s.key == "canary");
    CHECK(s.sampling.temperature == 0);
    CHECK(s.sampling.max_tokens == 8);
    rank.answer(s, "fine");
  });
  const Json canary = server.admin(R"({"do":"canary","prompt":"Are you well?","max_tokens":8})");
  canary_rank.join();
  CHECK(canary["ok"] == true);
  CHECK(canary["text"] == "fine");
  CHECK(canary["tokens"] == tiny().encode("fine").size() + 1);

  CHECK(server.admin("gate_open")["ok"] == true);
  CHECK(server.get("/ready").status == 200);
  rank.stats(true);
  rank.stats(true, false);
  CHECK(eventually([&] { return server.get("/health").status == 503; }));
  rank.stats(true);
  CHECK(eventually([&] { return server.get("/health").status == 200; }));
  CHECK(server.admin("drain")["ok"] == true);
  CHECK(server.get("/health").status == 503);
  const auto refused = server.post("/v1/chat/completions", chat_body());
  CHECK(error_code(refused) == 503);
  CHECK_FALSE(header(refused, "retry-after").empty());
  CHECK(server.admin("counters")["draining"] == true);
  CHECK(server.admin("dance")["ok"] == false);
  CHECK(server.admin(R"({"nonsense":1})")["ok"] == false);
}

TEST_CASE("the small endpoints") {
  Server server({{"api.model_name", "GLM"}, {"api.aliases", "a,b"}});
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  const Json models = glm53::parse_json(server.get("/v1/models").body);
  REQUIRE(models["data"].size() == 3);
  CHECK(models["data"][0]["id"] == "GLM");
  CHECK(models["data"][0]["max_model_len"] == 4096);
  CHECK(glm53::parse_json(server.get("/v1/models/b").body)["id"] == "b");
  CHECK(glm53::parse_json(server.get("/version").body)["version"] == "1.2.3 (test)");
  CHECK(glm53::parse_json(server.get("/load").body)["server_load"] == 0);
  CHECK(server.get("/ping").body.empty());

  const Json tokens =
      glm53::parse_json(server.post("/tokenize", R"({"prompt":"Hello <|user|>","return_token_strs":true})").body);
  CHECK(tokens["tokens"] == Json(tiny().encode("Hello <|user|>")));
  CHECK(tokens["count"] == tokens["tokens"].size());
  CHECK(tokens["token_strs"].back() == "<|user|>");
  const Json chat = glm53::parse_json(server.post("/tokenize", chat_body()).body);
  CHECK(tiny().decode(chat["tokens"].get<std::vector<int32_t>>()).ends_with("<|user|>Hi<|assistant|><think>"));
  CHECK(glm53::parse_json(server.post("/detokenize", R"({"tokens":[2631,5]})").body)["prompt"] ==
        tiny().decode(std::vector<int32_t>{2631, 5}));
  CHECK(server.post("/detokenize", R"({"tokens":[99999]})").status == 400);
  CHECK(server.post("/tokenize", "{}").status == 400);

  // A large body goes through the workers.
  const std::string large(200000, 'a');
  CHECK(glm53::parse_json(server.post("/tokenize", R"({"prompt":")" + large + "\"}").body)["count"] ==
        tiny().encode(large).size());

  const std::string metrics = server.get("/metrics").body;
  for (const char* name : {"glm53_num_requests_running{", "glm53_kv_cache_usage_perc{", "glm53_request_success_total{",
                           "glm53_time_to_first_token_seconds_bucket{", "http_requests_total{"}) {
    CHECK(metrics.find(name) != std::string::npos);
  }
  CHECK(metrics.find("model_name=\"GLM\"") != std::string::npos);
}

TEST_CASE("a rank's own error reaches the client") {
  Server server;
  FakeRank rank(server.rank_socket());
  server.wait_ready();
  wire::Delta failed;
  failed.finish = "error";
  failed.error = "out of blocks";
  failed.error_code = 503;
  Background plain(server, "/v1/chat/completions", chat_body());
  failed.id = rank.submitted().id;
  rank.send(failed);
  CHECK(error_code(plain.answer()) == 503);
  CHECK(plain.json()["error"]["message"] == "out of blocks");
  // A stream that has begun ends with an error event and [DONE].
  Background stream(server, "/v1/chat/completions", chat_body("\"stream\":true"));
  failed.id = rank.submitted().id;
  rank.tokens(failed.id, 0, tiny().encode("Well"));
  failed.index = static_cast<uint32_t>(tiny().encode("Well").size());
  rank.send(failed);
  bool done = false;
  const auto events = events_of(stream.answer().body, &done);
  CHECK(done);
  CHECK(stream.answer().status == 200);
  CHECK(events.back()["error"]["code"] == 503);
}
