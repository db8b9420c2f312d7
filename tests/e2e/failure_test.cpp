// Processes die at bad moments; the cluster comes back, and says why.
#include <signal.h>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/helpers.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

void kill_process(const LocalCluster& cluster, const std::string& name) {
  const pid_t pid = cluster.process_pid(name);
  REQUIRE(pid > 0);
  REQUIRE(::kill(pid, SIGKILL) == 0);
}

}  // namespace

TEST_CASE("kill -9 of rank 1: health fails, the pair restarts by itself, status says why") {
  LocalCluster cluster;
  cluster.set_fake({{"phase_ms", 200}});
  cluster.up();
  const pid_t api = cluster.process_pid("api");
  kill_process(cluster, "rank1");
  CHECK(wait_for([&] { return cluster.api_get("/health") != 200; }, 5s));
  REQUIRE(cluster.wait_up(1));
  CHECK(cluster.api_get("/health") == 200);
  CHECK(cluster.process_pid("api") == api);
  CHECK(cluster.status()["cluster"]["restarts"] == 1);
  const std::string page = cluster.ctl({"status"}).output;
  CHECK(contains(page, "rank1"));
  CHECK(contains(page, "signal 9"));
  CHECK(contains(cluster.chat("still here"), "still here"));
}

TEST_CASE("kill -9 of rank 0 in mid-stream: the client keeps its stream and gets the whole answer") {
  LocalCluster cluster;
  cluster.set_fake({{"token_ms", 60}});
  cluster.up();
  bool killed = false;
  const std::string prompt =
      "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau";
  const std::string answer = cluster.stream_chat(prompt, 300, [&](const std::string&) {
    if (!std::exchange(killed, true)) kill_process(cluster, "rank0");
  });
  CHECK(contains(answer, prompt));
  CHECK(cluster.generation() == 2);
  CHECK(contains(cluster.ctl({"status"}).output, "rank0"));
}

TEST_CASE("kill -9 of the API process: it is back, the ranks stay") {
  LocalCluster cluster;
  cluster.up();
  const pid_t rank0 = cluster.process_pid("rank0"), rank1 = cluster.process_pid("rank1"),
              api = cluster.process_pid("api");
  kill_process(cluster, "api");
  CHECK(wait_for([&] { return cluster.api_get("/ready") == 200 && cluster.process_pid("api") != api; }));
  CHECK(contains(cluster.chat("back again"), "back again"));
  CHECK(cluster.process_pid("rank0") == rank0);
  CHECK(cluster.process_pid("rank1") == rank1);
  CHECK(cluster.generation() == 1);
}

TEST_CASE("kill -9 of either agent: its children serve on and are adopted") {
  LocalCluster cluster;
  cluster.up();
  for (const std::string node : {"head", "worker"}) {
    CAPTURE(node);
    const pid_t rank0 = cluster.process_pid("rank0"), rank1 = cluster.process_pid("rank1"),
                api = cluster.process_pid("api");
    cluster.kill_agent(node);
    CHECK(contains(cluster.chat("without an agent"), "without an agent"));
    cluster.start_agent(node);
    REQUIRE(cluster.wait_up());
    REQUIRE(cluster.wait_status([](const Json& now) { return now["nodes"][1]["reachable"] == true; }));
    CHECK(cluster.process_pid("rank0") == rank0);
    CHECK(cluster.process_pid("rank1") == rank1);
    CHECK(cluster.process_pid("api") == api);
    CHECK(cluster.generation() == 1);
    CHECK(contains(cluster.chat("adopted"), "adopted"));
  }
  // An adopted child is watched like a child of one's own.
  kill_process(cluster, "rank1");
  CHECK(cluster.wait_up(1));
  CHECK(cluster.ctl({"stop"}).code == 0);
  CHECK(wait_for([&] { return cluster.processes().size() == 2; }, 10s));
}

TEST_CASE("kill -9 of the head's agent during a start: the start goes on when it is back") {
  LocalCluster cluster;
  cluster.set_fake({{"phase_ms", 200}});
  REQUIRE(cluster.ctl({"start", "--detach"}).code == 0);
  REQUIRE(cluster.wait_status([&](const Json&) { return cluster.process_pid("rank1") > 0; }));
  cluster.kill_agent("head");
  cluster.start_agent("head");
  CHECK(cluster.wait_up());
  CHECK(contains(cluster.chat("after all"), "after all"));
}

TEST_CASE("a rank that dies while loading is started again; one with bad weights is not") {
  LocalCluster cluster;
  cluster.set_fake(
      {{"rules", Json::array({{{"rank", 1}, {"phase", "load_target"}, {"generations", {1}}, {"do", "exit:66"}}})}});
  const auto first = cluster.ctl({"start"});
  CAPTURE(first.output);
  CHECK(first.code == 0);
  CHECK(cluster.generation() == 2);
  CHECK(cluster.ctl({"stop"}).code == 0);

  cluster.set_fake({{"rules", Json::array({{{"rank", 1}, {"phase", "load_target"}, {"do", "exit:65"}}})}});
  const auto second = cluster.ctl({"start"});
  CAPTURE(second.output);
  CHECK(second.code != 0);
  CHECK(contains(second.output, "rank1"));
  CHECK(contains(second.output, "exit with 65"));
  CHECK(cluster.state() == "failed");
  const auto generation = cluster.generation();
  CHECK(wait_for([&] { return cluster.processes().size() <= 3; }, 20s));  // agents, perhaps the API process

  cluster.set_fake(Json::object());
  const auto third = cluster.ctl({"start"});
  CAPTURE(third.output);
  CHECK(third.code == 0);
  CHECK(cluster.generation() > generation);
}

TEST_CASE("a rank that hangs while loading or while serving is found out") {
  ClusterOptions options;
  options.head["ranks.stall_timeout"] = "\"1s\"";
  options.head["ranks.watchdog"] = "\"3s\"";
  options.head["ranks.stop_grace"] = "\"1s\"";
  LocalCluster cluster(options);
  cluster.set_fake(
      {{"rules",
        Json::array({{{"rank", 1}, {"phase", "load_target"}, {"generations", {1}}, {"do", "hang"}},
                     {{"rank", 0}, {"phase", "ready"}, {"generations", {2}}, {"after_ms", 500}, {"do", "hang"}}})}});
  REQUIRE(cluster.ctl({"start", "--detach"}).code == 0);
  CHECK(cluster.wait_up(1));
  CHECK(cluster.wait_up(2));
  CHECK(contains(cluster.chat("at last"), "at last"));
}

TEST_CASE("stop works while the worker's agent is away") {
  ClusterOptions options;
  options.head["ranks.stop_grace"] = "\"1s\"";
  LocalCluster cluster(options);
  cluster.up();
  cluster.kill_agent("worker");
  const auto stopped = cluster.ctl({"stop", "--now"});
  CAPTURE(stopped.output);
  CHECK((stopped.code == 6 || stopped.code == 0));
  CHECK(cluster.process_pid("rank0") == 0);
  cluster.start_agent("worker");
  CHECK(wait_for([&] { return cluster.processes().size() == 2; }, 60s));
}
