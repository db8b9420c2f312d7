// glm53ctl doctor: through two agents, and on a machine without one.
#include <algorithm>
#include <set>

#include <doctest/doctest.h>

#include "common/json.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

using namespace glm53;
using namespace glm53::e2e;

namespace {

constexpr int kFailed = 3;
/// Checks of a node; the agents' comparison adds more to the worker's.
const std::vector<std::string> kChecks{
    "config",      "role",          "disk",        "writable",     "filesystem", "ports", "descriptors",
    "residue",     "engine",        "weights",     "draft",        "memory",     "gpu",   "driver",
    "persistence", "xid",           "fabric_link", "rdma_devices", "memlock",    "gid",   "foreign_gpu_use",
    "gpu_clock",   "fabric_frames", "rdma_write"};

Json check_named(const Json& node, const std::string& name) {
  for (const Json& check : node.at("checks")) {
    if (check.at("name") == name) return check;
  }
  return nullptr;
}

/// Every check is there once, with a value, and a remedy where one is needed.
void check_complete(const Json& node) {
  for (const std::string& name : kChecks) {
    CAPTURE(name);
    const Json check = check_named(node, name);
    REQUIRE(check.is_object());
    CHECK_FALSE(check.at("measured").get<std::string>().empty());
    const bool needs_remedy = check.at("verdict") == "fail" || check.at("verdict") == "warn";
    CHECK(needs_remedy != check.at("remedy").get<std::string>().empty());
  }
}

}  // namespace

TEST_CASE("doctor on two CPU nodes: all checks of both, exit 0, also while the cluster runs") {
  ClusterOptions options;
  options.head["engine.backend"] = "\"cpu\"";
  LocalCluster cluster(options);
  for (const bool running : {false, true}) {
    CAPTURE(running);
    if (running) cluster.up();
    const auto result = cluster.ctl({"doctor", "--json"});
    CAPTURE(result.output);
    CHECK(result.code == 0);
    const Json report = parse_json(result.output);
    CHECK(report.at("verdict") != "fail");
    REQUIRE(report.at("nodes").size() == 2);
    for (const Json& node : report.at("nodes")) check_complete(node);
    CHECK(report.at("nodes")[0].at("node") == "head");
    CHECK(check_named(report.at("nodes")[0], "gid").at("verdict") == "skip");
    CHECK(check_named(report.at("nodes")[1], "clock").at("verdict") == "pass");
  }
}

TEST_CASE("doctor on nodes without a GPU that are to use one: every failure of both, exit 3") {
  ClusterOptions options;
  options.head["engine.backend"] = "\"cuda\"";
  options.head["head.fabric_address"] = "\"203.0.113.1\"";
  options.head["worker.fabric_address"] = "\"203.0.113.2\"";
  LocalCluster cluster(options);
  const auto result = cluster.ctl({"doctor"});
  CAPTURE(result.output);
  CHECK(result.code == kFailed);
  for (const char* said :
       {"203.0.113.1 is not on any interface here", "203.0.113.2 is not on any interface here",
        "no interface has the fabric address", "set worker.fabric_address", "skipped: needs a GB10"}) {
    CAPTURE(std::string(said));
    CHECK(result.output.find(said) != std::string::npos);
  }
  const Json report = parse_json(cluster.ctl({"doctor", "--json"}).output);
  CHECK(report.at("verdict") == "fail");
  for (const Json& node : report.at("nodes")) {
    check_complete(node);
    CHECK(check_named(node, "gid").at("verdict") == "fail");
  }
}

TEST_CASE("doctor names a worker whose agent does not answer, and still checks the head") {
  ClusterOptions options;
  options.head["engine.backend"] = "\"cpu\"";
  LocalCluster cluster(options);
  cluster.stop_agent("worker");
  const auto result = cluster.ctl({"doctor", "--json"});
  CAPTURE(result.output);
  CHECK(result.code == kFailed);
  const Json report = parse_json(result.output);
  REQUIRE(report.at("nodes").size() == 2);
  check_complete(report.at("nodes")[0]);
  CHECK(check_named(report.at("nodes")[1], "reach").at("verdict") == "fail");
}

TEST_CASE("doctor without an agent: the GB10 example on a plain machine lists every check and exits 3") {
  const TempDir dir;
  const auto doctor = [&](const std::string& config) {
    return run_program({program("glm53ctl"), "--json", "--config", config, "doctor", "--local"}, dir.path());
  };
  const auto result = doctor(source_dir() + "/config.gb10.toml.example");
  CAPTURE(result.output);
  CHECK(result.code == kFailed);
  const Json report = parse_json(result.output);
  REQUIRE(report.at("nodes").size() == 1);
  check_complete(report.at("nodes")[0]);
  CHECK(check_named(report.at("nodes")[0], "role").at("measured").get<std::string>().find("10.0.0.1") !=
        std::string::npos);

  for (const char* name : {"state", "run", "logs"}) make_dirs(dir.path() + "/" + name);
  write_file(dir.path() + "/cpu.toml",
             cat("paths.state = \"state\"\npaths.run = \"run\"\npaths.logs = \"logs\"\nengine.backend = \"cpu\"\n"
                 "topology.ranks = [\"head:0\"]\nmemory.reserve = \"64MiB\"\napi.port = ",
                 free_port("127.0.0.1"), "\nranks.port = ", free_port("127.0.0.1"), "\nmodel.path = \"", source_dir(),
                 "/models/glm53-tiny\"\ndraft.path = \"", source_dir(), "/models/glm53-tiny-dflash2\"\n"));
  const auto fine = doctor(dir.path() + "/cpu.toml");
  CAPTURE(fine.output);
  CHECK(fine.code == 0);
  CHECK(parse_json(fine.output).at("verdict") != "fail");
  // The same without --local: no agent answers at that socket.
  const auto fallback = run_program({program("glm53ctl"), "--config", dir.path() + "/cpu.toml", "doctor"}, dir.path());
  CAPTURE(fallback.output);
  CHECK(fallback.code == 0);
  CHECK(fallback.output.find("no agent answers") != std::string::npos);

  write_file(dir.path() + "/bad.toml", "engine.backend = \"gpu\"\n");
  CHECK(doctor(dir.path() + "/bad.toml").code == 2);
}
