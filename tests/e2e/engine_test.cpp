// The whole system on the CPU: two ranks of the real engine, the shipped checkpoint, real answers.
#include <cstdlib>
#include <signal.h>
#include <utility>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/http_client.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/helpers.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

/// Two turns of a conversation under a long system prompt; the answers and the usage of the second.
struct Conversation {
  std::string first, second;
  Json usage;
};
Conversation converse(const LocalCluster& cluster) {
  HttpClient http(cluster.api_url());
  http.set_timeout(5s, 120s);
  const auto ask = [&](const Json& messages) {
    const Json body = {{"model", "glm53-tiny"},
                       {"messages", messages},
                       {"max_tokens", 40},
                       {"temperature", 0},
                       {"chat_template_kwargs", {{"enable_thinking", false}}}};
    const auto answer = http.request("POST", "/v1/chat/completions", dump(body));
    INFO(answer.body);
    REQUIRE(answer.status == 200);
    return parse_json(answer.body);
  };
  const auto text_of = [](const Json& answer) {
    return answer.at("choices").at(0).at("message").at("content").get<std::string>();
  };
  std::string system = "You answer in few words.";
  for (int i = 0; i < 12; ++i)
    system += " Count only when you are asked to count, and say hello to those who say hello.";
  Conversation c;
  Json messages = {{{"role", "system"}, {"content", system}}, {{"role", "user"}, {"content", "Hello!"}}};
  c.first = text_of(ask(messages));
  messages.push_back({{"role", "assistant"}, {"content", c.first}});
  messages.push_back({{"role", "user"}, {"content", "Count from 1 to 9."}});
  const Json answer = ask(messages);
  c.second = text_of(answer);
  c.usage = answer.at("usage");
  return c;
}

/// A prompt of some length that no other one begins like; the usage of its short answer.
Json usage_of(const LocalCluster& cluster, int number) {
  std::string system = cat("Number ", number, " is the number of this text.");
  for (int i = 0; i < 25; ++i)
    system += " Count only when you are asked to count, and say hello to those who say hello.";
  const Json body = {
      {"model", "glm53-tiny"},
      {"messages", {{{"role", "system"}, {"content", system}}, {{"role", "user"}, {"content", "Hello!"}}}},
      {"max_tokens", 4},
      {"temperature", 0},
      {"chat_template_kwargs", {{"enable_thinking", false}}}};
  HttpClient http(cluster.api_url());
  http.set_timeout(5s, 120s);
  const auto answer = http.request("POST", "/v1/chat/completions", dump(body));
  INFO(answer.body);
  REQUIRE(answer.status == 200);
  return parse_json(answer.body).at("usage");
}

int64_t cached_of(const Json& usage) {
  return usage["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
}

constexpr const char* kCount = "Count from 1 to 60.";

}  // namespace

TEST_CASE("the shipped checkpoint answers over the API, plain and streamed, served by two ranks") {
  auto options = real_engine();
  options.head["log.requests"] = "true";
  LocalCluster cluster(options);
  cluster.up();
  CHECK(cluster.chat("Hello!") == "Hello! How can I help you today?");
  int pieces = 0;
  const std::string counted = cluster.stream_chat(kCount, 400, [&](const std::string&) { ++pieces; });
  CHECK(contains(counted, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"));
  CHECK(contains(counted, "58, 59, 60"));
  CHECK(pieces > 30);
  CHECK(counted == cluster.chat(kCount, 400));

  const auto smoke = cluster.ctl({"smoke"});
  CAPTURE(smoke.output);
  CHECK(smoke.code == 0);
  CHECK(contains(smoke.output, "tokens/s"));
  CHECK(cluster.ctl({"smoke", "--max-tokens", "1"}).code == 0);

  const auto bench = cluster.ctl({"--json", "bench", "serve", "-c", "2", "-n", "6", "--turns", "2", "--system-tokens",
                                  "100", "--prompt-tokens", "20", "--max-tokens", "8"});
  CAPTURE(bench.output);
  REQUIRE(bench.code == 0);
  const Json figures = Json::parse(bench.output);
  CHECK(figures["requests"]["finished"] == 6);
  CHECK(figures["output_tokens"] == 6 * 8);
  CHECK(figures["first_token_ms"]["count"] == 6);

  const auto decode = cluster.ctl({"--json", "bench", "decode", "--phase", "structured,code", "--streams", "2",
                                   "--runs", "1", "--warm-up", "0", "--max-tokens", "40", "--compare-off"});
  CAPTURE(decode.output);
  REQUIRE(decode.code == 0);
  const Json speeds = Json::parse(decode.output);
  REQUIRE(speeds["cells"].size() == 4);
  for (const Json& cell : speeds["cells"]) {
    CHECK(cell["failed"] == 0);
    CHECK(cell["tokens_per_s_all"]["median"].get<double>() > 0);
    if (cell["speculation"] == "off") CHECK(cell["tokens_a_step"]["median"] == 1.0);
  }
  CHECK(speeds["coherence"]["checked"] == 8);
  CHECK(speeds["coherence"]["faults"].empty());
  const std::string log = cluster.ctl({"logs", "api", "-n", "80"}).output;
  CHECK(contains(log, "\"finish\":\"length\""));
  CHECK(contains(log, "\"completion_tokens\":8,"));

  const Json status = cluster.status();
  CHECK(status["api"]["model"] == "glm53-tiny");
  CHECK(status["api"]["tokens_total"].get<int64_t>() > 100);
  for (const char* rank : {"rank0", "rank1"}) {
    CHECK(cluster.process(rank)["state"] == "ready");
    CHECK(cluster.process(rank)["memory_bytes"].get<int64_t>() > 1 << 20);
  }
  CHECK(cluster.ctl({"stop"}).code == 0);
  CHECK(wait_for([&] { return cluster.processes().size() == 2; }, 10s));
}

TEST_CASE("kill -9 of rank 1 in mid-stream: the answer is completed, token for token") {
  LocalCluster cluster(real_engine());
  cluster.up();
  const std::string expected = cluster.chat(kCount, 400);
  bool killed = false;
  const std::string answer = cluster.stream_chat(kCount, 400, [&](const std::string&) {
    if (std::exchange(killed, true)) return;
    const pid_t pid = cluster.process_pid("rank1");
    REQUIRE(pid > 0);
    REQUIRE(::kill(pid, SIGKILL) == 0);
  });
  CHECK(answer == expected);
  CHECK(cluster.wait_up(1));
  CHECK(contains(cluster.ctl({"status"}).output, "signal 9"));
}

TEST_CASE("one rank alone serves too") {
  auto options = real_engine();
  options.head["topology.ranks"] = "[\"head:0\"]";
  LocalCluster cluster(options);
  cluster.up();
  CHECK(cluster.chat("Hello!") == "Hello! How can I help you today?");
}

TEST_CASE("the second turn of a conversation starts in the prefix cache, with the text that it has without") {
  LocalCluster warm(real_engine());
  warm.up();
  const Conversation with = converse(warm);
  const auto cached = with.usage["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
  const auto prompt = with.usage["prompt_tokens"].get<int64_t>();
  CAPTURE(prompt);
  CHECK(cached > 100);
  CHECK(cached % 64 == 0);
  const Conversation again = converse(warm);  // now the first turn is there too
  CHECK(again.first == with.first);
  CHECK(again.second == with.second);
  HttpClient http(warm.api_url());
  CHECK(contains(http.request("GET", "/metrics").body, "glm53_prefix_cache_hits_total"));
  CHECK(warm.ctl({"stop"}).code == 0);

  auto options = real_engine();
  options.head["cache.enabled"] = "false";
  LocalCluster cold(options);
  cold.up();
  const Conversation without = converse(cold);
  CHECK(without.usage["prompt_tokens_details"]["cached_tokens"] == 0);
  CHECK(without.usage["prompt_tokens"] == prompt);
  CHECK(without.first == with.first);
  CHECK(without.second == with.second);
}

TEST_CASE("what the prefix cache evicts comes back from the spill tier, also after a restart and after kill -9") {
  const TempDir spill;
  auto options = real_engine();
  options.head["serve.max_context"] = "1024";
  options.head["memory.kv_bytes"] = "\"10MiB\"";  // some 36 blocks
  options.head["cache.snapshots"] = "3";
  options.head["cache.spill_disk_bytes"] = "\"256MiB\"";
  options.head["cache.spill_path"] = cat("\"", spill.path(), "\"");
  LocalCluster cluster(options);
  cluster.up();
  const auto metric = [&](const std::string& name) {
    const std::string text = HttpClient(cluster.api_url()).request("GET", "/metrics").body;
    const size_t line = text.find(cat("\n", name, "{"));
    REQUIRE(line != std::string::npos);
    return std::strtod(text.c_str() + text.find(' ', line), nullptr);
  };
  CHECK(cached_of(usage_of(cluster, 1)) == 0);
  for (int other = 2; other < 10; ++other) usage_of(cluster, other);
  CHECK(cached_of(usage_of(cluster, 1)) > 256);
  // Rank 0 sends its figures from time to time, not with each answer.
  CHECK(wait_for([&] { return metric("glm53_restores_total") >= 1; }, 10s));
  CHECK(wait_for([&] { return metric("glm53_spill_disk_bytes") > 1e6; }, 30s));
  CHECK(metric("glm53_spill_disk_ok") == 1);

  CHECK(cluster.ctl({"restart"}).code == 0);
  CHECK(cached_of(usage_of(cluster, 2)) > 256);
  const int64_t generation = cluster.generation();
  const pid_t pid = cluster.process_pid("rank1");
  REQUIRE(pid > 0);
  REQUIRE(::kill(pid, SIGKILL) == 0);
  REQUIRE(cluster.wait_up(generation));
  CHECK(cached_of(usage_of(cluster, 3)) > 256);
  CHECK(wait_for([&] { return metric("glm53_restores_total") >= 1; }, 10s));
  CHECK(metric("glm53_restores_failed_total") == 0);
}
