// The whole system on the CPU: two ranks of the real engine, the shipped checkpoint, real answers.
#include <signal.h>
#include <utility>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/e2e/cluster.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

bool contains(const std::string& text, const std::string& part) {
  INFO("looking for '", part, "' in: ", text);
  return text.find(part) != std::string::npos;
}

ClusterOptions real_engine() {
  ClusterOptions options;
  options.fake_rank = false;
  return options;
}

constexpr const char* kCount = "Count from 1 to 60.";

}  // namespace

TEST_CASE("the shipped checkpoint answers over the API, plain and streamed, served by two ranks") {
  LocalCluster cluster(real_engine());
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
