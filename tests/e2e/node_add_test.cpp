// glm53ctl node add against a real sshd on loopback: strict host keys, idempotent, and a worker that is a member after
// it.
#include <filesystem>
#include <signal.h>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/sshd.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string must(const std::vector<std::string>& argv, const TempDir& dir) {
  const ProgramResult result = run_program(argv, dir.path(), 30s);
  INFO(result.output);
  REQUIRE(result.code == 0);
  return std::string(trim(result.output));
}

std::string quoted(const std::string& text) {
  return "\"" + text + "\"";
}

}  // namespace

TEST_CASE("node add: over SSH to a member that serves, again without change, and never past a host key") {
  if (!fs::exists(Sshd::kProgram)) {
    MESSAGE("left out: there is no sshd");
    return;
  }
  const TempDir dir;
  const std::string head = cat("127.0.0.1:", free_port("127.0.0.1")),
                    worker = cat("127.0.0.3:", free_port("127.0.0.3"));
  ClusterOptions options;
  options.head = {{"admin.listen", quoted(head)}, {"admin.tls", quoted("on")}, {"worker.admin", quoted(worker)}};
  LocalCluster cluster(options);
  const Sshd sshd(dir.path() + "/ssh", "127.0.0.1", free_port("127.0.0.1"));
  const std::string bundle = dir.path() + "/bundle", root = dir.path() + "/root";
  make_bundle(bundle);
  const std::string user = must({"/usr/bin/env", "id", "-un"}, dir);
  const auto add = [&](const std::string& known) {
    return cluster.ctl({"node", "add", user + "@127.0.0.1", "--bundle", bundle, "--ssh-port",
                        std::to_string(sshd.port()), "--ssh-key", sshd.path("user"), "--known-hosts",
                        sshd.path("known." + known), "--root", root, "--listen", worker});
  };
  CHECK(contains(add("host").output, "E720 the head has no certificate yet"));
  REQUIRE(cluster.ctl({"cluster", "init"}).code == 0);

  for (const char* known : {"other", "none"}) {
    CAPTURE(known);
    const ProgramResult refused = add(known);
    CHECK(refused.code == 1);
    CHECK(contains(refused.output, "E303 the host key of 127.0.0.1 is not known, or not the one that is known"));
    CHECK_FALSE(fs::exists(root));
  }
  const ProgramResult first = add("host");
  CAPTURE(first.output);
  REQUIRE(first.code == 0);
  CHECK(contains(first.output, "wrote " + root + "/etc/glm53/config.toml"));
  CHECK(contains(first.output, "the agent does not answer yet"));
  CHECK(contains(read_file(root + "/etc/systemd/system/glm53-agent.service"),
                 "ExecStart=" + root + "/opt/glm53/current/"));

  // What systemd would do.
  SpawnOptions agent;
  agent.argv = {root + "/opt/glm53/current/glm53-agent", "--config", root + "/etc/glm53/config.toml"};
  agent.env = {{"PATH", "/usr/bin:/bin"}};
  const Child child = spawn(agent);
  REQUIRE(wait_for([&] { return fs::exists(root + "/run/glm53/agent.sock"); }));
  const ProgramResult second = add("host");
  CAPTURE(second.output);
  CHECK(contains(second.output, "installed already"));
  CHECK(contains(second.output, "kept " + root + "/etc/glm53/config.toml"));
  CHECK(contains(second.output, "this node is worker of cluster glm53"));
  CHECK(contains(add("host").output, "is a member already"));
  CHECK(cluster.wait_status([](const Json& status) { return status["nodes"][1]["reachable"] == true; }));
  CHECK(contains(cluster.ctl({"node", "list"}).output, "https://" + worker));

  // Another bundle is another release; the old one stays until somebody removes it.
  write_file(bundle + "/note", "new");
  CHECK(contains(add("host").output, "installed " + root + "/opt/glm53/current"));
  size_t releases = 0;
  for (const auto& entry : fs::directory_iterator(root + "/opt/glm53/releases"))
    releases += entry.is_directory() ? 1 : 0;
  CHECK(releases == 2);
  // Nothing of the way is left, and no secret of it.
  const std::string all = cluster.ctl({"--json", "cluster", "show"}).output + second.output;
  CHECK_FALSE(contains(all, "glm53-0"));
  signal_group(child.id, SIGTERM);
  CHECK(wait_until(child.id.pid, std::chrono::steady_clock::now() + 30s).has_value());
}

TEST_CASE("node add: targets, bundles and roots that cannot be are refused before anything is sent") {
  LocalCluster cluster;
  const TempDir dir;
  for (const char* target : {"host", "@host", "root@", "-oProxyCommand=x@h", "a b@c", "root@h;id", "root@$(id)"}) {
    CAPTURE(target);
    CHECK(cluster.ctl({"node", "add", "--bundle", dir.path(), "--", target}).code == 2);
  }
  const ProgramResult none = cluster.ctl({"node", "add", "root@127.0.0.1", "--bundle", dir.path()});
  CHECK(none.code == 2);
  CHECK(contains(none.output, "is no bundle of the programs"));
  make_bundle(dir.path() + "/b");
  CHECK(cluster.ctl({"node", "add", "root@127.0.0.1", "--bundle", dir.path() + "/b", "--root", "/a b"}).code == 2);
}
