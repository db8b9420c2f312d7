// Mistakes of people: clear words, the documented exit code, nothing broken.
#include <filesystem>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/socket.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/helpers.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

constexpr int kBadConfig = 2, kStateInUse = 73, kPortInUse = 74;

/// Runs an agent that should refuse to start.
ProgramResult refused_agent(const TempDir& dir, const std::string& toml) {
  write_file(dir.path() + "/config.toml", cat("paths.state = \"", dir.path(), "/state\"\npaths.run = \"", dir.path(),
                                              "/run\"\npaths.logs = \"", dir.path(), "/logs\"\n", toml));
  return run_program({program("glm53-agent"), "--config", dir.path() + "/config.toml"}, dir.path(), 20s);
}

}  // namespace

TEST_CASE("an unknown key is refused with file, line and the nearest name") {
  const TempDir dir;
  const auto result = refused_agent(dir, "serve.max_seq = 4\n");
  CAPTURE(result.output);
  CHECK(result.code == kBadConfig);
  CHECK(contains(result.output, "config.toml:4"));
  CHECK(contains(result.output, "serve.max_seqs"));
  const auto checked = run_program({program("glm53ctl"), "config", "check", dir.path() + "/config.toml"}, dir.path());
  CHECK(checked.code == kBadConfig);
  CHECK(contains(checked.output, "serve.max_seqs"));
}

TEST_CASE("wrong types and values are refused") {
  for (const char* line :
       {"api.port = \"many\"", "api.port = 70000", "node.role = \"boss\"", "serve.max_seqs = 0", "api.port ="}) {
    const TempDir dir;
    CAPTURE(line);
    CHECK(refused_agent(dir, cat(line, "\n")).code == kBadConfig);
  }
}

TEST_CASE("without TLS an admin address beyond loopback, and a token others can read are refused") {
  const TempDir dir;
  write_file(dir.path() + "/token", "xyzzy-42", 0600);
  const std::string token = cat("admin.token_file = \"", dir.path(), "/token\"\n");
  CHECK(refused_agent(dir, cat("admin.listen = \"0.0.0.0:0\"\nadmin.tls = \"off\"\n", token)).code == kBadConfig);
  CHECK(refused_agent(dir, "admin.listen = \"127.0.0.1:18890\"\n").code == kBadConfig);
  REQUIRE(::chmod((dir.path() + "/token").c_str(), 0644) == 0);
  const auto result = refused_agent(dir, cat("admin.listen = \"127.0.0.1:18890\"\n", token));
  CHECK(result.code == kBadConfig);
  CHECK_FALSE(contains(result.output, "xyzzy-42"));
}

TEST_CASE("two agents on one state directory: the second leaves, the first goes on") {
  LocalCluster cluster;
  const auto second =
      run_program({program("glm53-agent"), "--config", cluster.config("head")}, cluster.temp_dir(), 20s);
  CAPTURE(second.output);
  CHECK(second.code == kStateInUse);
  CHECK(contains(second.output, "state"));
  CHECK(cluster.ctl({"start"}).code == 0);
}

TEST_CASE("an admin port that is taken is named") {
  const TempDir dir;
  const UniqueFd taken = listen_tcp("127.0.0.1", 0);
  const std::string address = cat("127.0.0.1:", local_port(taken.get()));
  write_file(dir.path() + "/token", "xyzzy-42", 0600);
  const auto result =
      refused_agent(dir, cat("admin.listen = \"", address, "\"\nadmin.token_file = \"", dir.path(), "/token\"\n"));
  CAPTURE(result.output);
  CHECK(result.code == kPortInUse);
  CHECK(contains(result.output, address));
}

TEST_CASE("an API port that is taken fails the start and says so; free again, it works") {
  LocalCluster cluster;
  UniqueFd taken = listen_tcp("127.0.0.1", cluster.api_port());
  const auto result = cluster.ctl({"start"});
  CAPTURE(result.output);
  CHECK(result.code != 0);
  CHECK(contains(result.output, cat(cluster.api_port())));
  CHECK(cluster.status().is_object());
  taken.reset();
  const auto again = cluster.ctl({"start"});
  CAPTURE(again.output);
  CHECK(again.code == 0);
}

TEST_CASE("a model folder that is not there fails the start and names it") {
  ClusterOptions options;
  options.fake_rank = false;
  options.head["model.path"] = "\"/nowhere/model\"";
  LocalCluster cluster(options);
  const auto result = cluster.ctl({"start"});
  CAPTURE(result.output);
  CHECK(result.code != 0);
  CHECK(contains(result.output, "/nowhere/model"));
  CHECK(cluster.status().is_object());
}

TEST_CASE("glm53ctl: usage errors are 2, a missing agent is 1, errors are JSON with --json") {
  const TempDir dir;
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program("glm53ctl"));
    return run_program(arguments, dir.path());
  };
  CHECK(run({}).code == 2);
  CHECK(run({"strat"}).code == 2);
  CHECK(run({"start", "--wait", "never"}).code == 2);
  CHECK(run({"--socket", "/nowhere.sock", "start", "--set", "serve.max_seq=1"}).code == 2);
  CHECK(run({"--help"}).code == 0);
  CHECK(run({"--version"}).code == 0);
  const auto away = run({"--socket", "/nowhere.sock", "status"});
  CHECK(away.code == 1);
  CHECK(contains(away.output, "/nowhere.sock"));
  const auto json = run({"--socket", "/nowhere.sock", "--json", "status"});
  CHECK(Json::parse(json.output)["error"]["code"] == "unavailable");
  const auto example = run({"config", "example"});
  CHECK(example.code == 0);
  write_file(dir.path() + "/example.toml", example.output);
  const auto checked = run({"config", "check", dir.path() + "/example.toml"});
  CAPTURE(checked.output);
  CHECK(checked.code == 0);
}

TEST_CASE("a state database that is damaged is moved aside and said; the agent goes on with a new one") {
  LocalCluster cluster;
  const std::string state = cluster.dir() + "/head/state";
  cluster.stop_agent("head");
  write_file(state + "/state.db", std::string(20'000, 'x'));
  cluster.start_agent("head");
  const auto status = cluster.ctl({"status"});
  CAPTURE(status.output);
  CHECK(status.code == 0);
  CHECK(contains(status.output, "the state database was damaged and is now at " + state + "/state.db.corrupt-"));
  int aside = 0;
  for (const auto& entry : std::filesystem::directory_iterator(state))
    aside += entry.path().filename().string().starts_with("state.db.corrupt-") ? 1 : 0;
  CHECK(aside >= 1);
  CHECK(cluster.state() == "down");
}
