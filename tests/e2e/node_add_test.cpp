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

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

constexpr const char* kSshd = "/usr/sbin/sshd";

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string must(const std::vector<std::string>& argv, const TempDir& dir) {
  const ProgramResult result = run_program(argv, dir.path(), 30s);
  INFO(result.output);
  REQUIRE(result.code == 0);
  return std::string(trim(result.output));
}

/// An sshd of the test's own: its keys, its port, this user.
class Sshd {
 public:
  explicit Sshd(const TempDir& dir) : dir_(dir), port_(free_port("127.0.0.1")) {
    for (const char* key : {"host", "other", "user"}) {
      must({"/usr/bin/env", "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path(key)}, dir);
    }
    if (::geteuid() == 0)
      (void)::mkdir("/run/sshd", 0755);  // where it separates its privileges; else it does not start
    write_file(path("config"),
               cat("Port ", port_, "\nListenAddress 127.0.0.1\nHostKey ", path("host"), "\nAuthorizedKeysFile ",
                   path("user.pub"), "\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"));
    for (const char* key : {"host", "other"}) {
      write_file(path(cat("known.", std::string_view(key))),
                 cat("[127.0.0.1]:", port_, " ", read_file(path(cat(std::string_view(key), ".pub")))));
    }
    write_file(path("known.none"), "");
    SpawnOptions options;
    options.argv = {kSshd, "-D", "-e", "-f", path("config")};
    options.env["PATH"] = "/usr/bin:/bin";
    child_ = spawn(options);
    REQUIRE(wait_for([&] {
      try {
        return static_cast<bool>(connect_tcp("127.0.0.1", port_, std::chrono::steady_clock::now() + 1s));
      } catch (const std::exception&) {
        return false;
      }
    }));
  }
  ~Sshd() {
    signal_group(child_.id, SIGTERM);
    wait_until(child_.id.pid, std::chrono::steady_clock::now() + 10s);
  }
  Sshd(const Sshd&) = delete;
  Sshd& operator=(const Sshd&) = delete;
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }
  uint16_t port() const { return port_; }

 private:
  const TempDir& dir_;
  const uint16_t port_;
  Child child_;
};

/// Programs of this build as scripts/bundle.sh lays them out.
void make_bundle(const std::string& dir) {
  fs::create_directories(dir + "/systemd");
  write_file(dir + "/.glm53-bundle", "");
  for (const char* name : {"glm53-agent", "glm53ctl", "glm53-engine"}) {
    write_file(cat(dir, "/", std::string_view(name)), cat("#!/bin/sh\nexec ", program(name), " \"$@\"\n"), 0755);
  }
  write_file(dir + "/systemd/glm53-agent.service.in", read_file(source_dir() + "/systemd/glm53-agent.service.in"));
}

std::string quoted(const std::string& text) {
  return "\"" + text + "\"";
}

}  // namespace

TEST_CASE("node add: over SSH to a member that serves, again without change, and never past a host key") {
  if (!fs::exists(kSshd)) {
    MESSAGE("left out: there is no sshd");
    return;
  }
  const TempDir dir;
  const std::string head = cat("127.0.0.1:", free_port("127.0.0.1")),
                    worker = cat("127.0.0.3:", free_port("127.0.0.3"));
  ClusterOptions options;
  options.head = {{"admin.listen", quoted(head)}, {"admin.tls", quoted("on")}, {"worker.admin", quoted(worker)}};
  LocalCluster cluster(options);
  const Sshd sshd(dir);
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
