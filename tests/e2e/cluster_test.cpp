// The control plane with fake ranks: start, status, stop, and glm53ctl's manners.
#include "tests/e2e/cluster.h"

#include <filesystem>
#include <signal.h>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/e2e/helpers.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

std::vector<std::string> files_under(const std::string& folder) {
  std::vector<std::string> out;
  if (!fs::exists(folder)) return out;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_directory()) out.push_back(entry.path().string());
  }
  return out;
}

}  // namespace

TEST_CASE("start, chat, status, stop, and nothing is left") {
  LocalCluster cluster;
  CHECK(cluster.state() == "down");
  const auto started = cluster.ctl({"start"});
  CAPTURE(started.output);
  REQUIRE(started.code == 0);
  CHECK(contains(started.output, "ready (generation 1)"));
  CHECK(cluster.api_get("/health") == 200);
  CHECK(cluster.api_get("/ready") == 200);
  CHECK(contains(cluster.chat("hello fox"), "hello fox"));

  const auto again = cluster.ctl({"start"});
  CHECK(again.code == 0);
  CHECK(contains(again.output, "already up (generation 1)"));

  const auto page = cluster.ctl({"status"});
  CHECK(page.code == 0);
  for (const char* part :
       {"head", "worker", "agent", "api", "rank0", "rank1", "generation 1", "glm53-tiny", "tokens/s", "MiB"}) {
    CHECK(contains(page.output, part));
  }
  const Json status = Json::parse(cluster.ctl({"--json", "status"}).output);
  CHECK(status["cluster"]["state"] == "up");
  CHECK(status["nodes"].size() == 2);
  CHECK(status["nodes"][1]["reachable"] == true);

  const auto stopped = cluster.ctl({"stop"});
  CAPTURE(stopped.output);
  CHECK(stopped.code == 0);
  CHECK(cluster.state() == "down");
  CHECK(cluster.api_get("/health") == 0);
  CHECK(wait_for([&] { return cluster.processes().size() == 2; }, 5s));  // the agents
  for (const std::string node : {"head", "worker"}) {
    for (const auto& file : files_under(cluster.run_dir(node))) {
      INFO("left behind: ", file);
      CHECK(file.find("rank") == std::string::npos);
      CHECK(file.find("api") == std::string::npos);
    }
  }
  CHECK(cluster.ctl({"stop"}).code == 0);

  cluster.stop_agent("head");
  cluster.stop_agent("worker");
  CHECK(cluster.processes().empty());
  for (const std::string node : {"head", "worker"}) {
    // The lock's file stays: taking it away would let two agents hold two locks of one name.
    for (const auto& file : files_under(cluster.run_dir(node))) CHECK(fs::path(file).filename() == "agent.lock");
  }
  CHECK(files_under(cluster.temp_dir()).empty());
}

TEST_CASE("a stream comes piece by piece and equals the plain answer") {
  LocalCluster cluster;
  cluster.up();
  int pieces = 0;
  const std::string prompt = "one two three four five six seven";
  const std::string streamed = cluster.stream_chat(prompt, 200, [&](const std::string&) { ++pieces; });
  CHECK(contains(streamed, prompt));
  CHECK(pieces > 3);
  CHECK(streamed == cluster.chat(prompt));
}

TEST_CASE("restart makes a new generation and keeps the settings given with --set") {
  LocalCluster cluster;
  cluster.up();
  const auto result = cluster.ctl({"restart", "--set", "serve.max_seqs=3"});
  CAPTURE(result.output);
  CHECK(result.code == 0);
  CHECK(cluster.generation() > 1);
  const Json config = Json::parse(cluster.ctl({"--json", "config", "show"}).output);
  CAPTURE(config.dump());
  CHECK(config["serve.max_seqs"]["value"] == 3);
}

TEST_CASE("Ctrl-C leaves glm53ctl with 130 and the start goes on") {
  LocalCluster cluster;
  cluster.set_fake({{"phase_ms", 200}});
  const Child ctl = cluster.spawn_ctl({"start"});
  REQUIRE(cluster.wait_status([](const Json& now) {
    const auto state = now["cluster"].value("state", "");
    return state != "down" && state != "up";
  }));
  ::kill(ctl.id.pid, SIGINT);
  const auto end = wait_until(ctl.id.pid, std::chrono::steady_clock::now() + 20s);
  REQUIRE(end);
  CHECK(end->code == 130);
  CHECK(cluster.wait_up());
}

TEST_CASE("--detach returns at once, a second start joins, a different one is refused") {
  LocalCluster cluster;
  cluster.set_fake({{"phase_ms", 300}});
  const auto first = cluster.ctl({"start", "--detach"});
  CHECK(first.code == 0);
  CHECK(first.output.starts_with("op-"));
  const auto other = cluster.ctl({"start", "--set", "serve.max_seqs=5"});
  CAPTURE(other.output);
  CHECK(other.code == 4);
  const auto second = cluster.ctl({"start"});
  CAPTURE(second.output);
  CHECK(second.code == 0);
  CHECK(contains(second.output, "joining"));
  CHECK(cluster.state() == "up");
}

TEST_CASE("stop ends a start that is at work") {
  LocalCluster cluster;
  cluster.set_fake({{"phase_ms", 2000}});
  CHECK(cluster.ctl({"start", "--detach"}).code == 0);
  const auto stopped = cluster.ctl({"stop", "--now"});
  CAPTURE(stopped.output);
  CHECK(stopped.code == 0);
  CHECK(cluster.state() == "down");
  CHECK(wait_for([&] { return cluster.processes().size() == 2; }, 10s));
}

TEST_CASE("logs of every process can be read on the head") {
  LocalCluster cluster;
  cluster.up();
  const auto both = cluster.ctl({"logs"});
  CAPTURE(both.output);
  CHECK(both.code == 0);
  CHECK(contains(both.output, "rank0| "));
  CHECK(contains(both.output, "rank1| "));
  CHECK(contains(cluster.ctl({"logs", "rank1"}).output, "fake rank 1 of 2"));
  CHECK(contains(cluster.ctl({"logs", "rank0", "--generation", "1"}).output, "fake rank 0 of 2"));
  CHECK(cluster.ctl({"logs", "rank0", "--generation", "99"}).code != 0);
  CHECK(cluster.ctl({"logs", "nobody"}).code == 2);
}

TEST_CASE("the admin API over TCP wants its token and knows no other address") {
  LocalCluster cluster;
  const Json config = Json::parse(cluster.ctl({"--json", "config", "show"}).output);
  const std::string url = cat("http://", config["admin.listen"]["value"].get<std::string>());
  CHECK(HttpClient(url).request("GET", "/admin/v1/status").status == 401);
  CHECK(HttpClient(url, "wrong").request("GET", "/admin/v1/status").status == 401);
  CHECK(HttpClient(url, cluster.token("head")).request("GET", "/admin/v1/status").status == 200);
  CHECK(config.dump().find(cluster.token("head")) == std::string::npos);
}
