// Two hosts from nothing: network namespaces with a cable between them, each with its own sshd, agent and folders.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <set>
#include <signal.h>

#include <doctest/doctest.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/e2e/helpers.h"
#include "tests/e2e/netns.h"
#include "tests/e2e/secrets.h"
#include "tests/e2e/sshd.h"
#include "tests/unit/hub/fake_hub.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

constexpr const char* kRepo = "org/glm53-tiny";
constexpr uint16_t kApi = 8888, kAdmin = 8890;

std::string quoted(const std::string& text) {
  return "\"" + text + "\"";
}

/// Why the tests here are left out; empty where they can run.
std::string why_not() {
  if (!fs::exists(Sshd::kProgram)) return "there is no sshd";
  return Namespaces::why_not();
}
/// A decorator: where that cannot be, the test is skipped, counted as skipped, and its name and the reason are printed.
auto where_possible(const char* name) {
  const std::string why = why_not();
  if (!why.empty()) std::cout << "left out: " << name << ": " << why << "\n";
  return doctest::skip(!why.empty());
}

/// The two hosts and everything on them that a test starts.
class TwoHosts {
 public:
  TwoHosts() {
    const std::string key = random_hex(16);
    api_key_ = "sk-" + key, hub_token_ = "hf_" + random_hex(16);
    watch.add("the API key", api_key_);
    watch.add("the Hub's token", hub_token_);
    for (const char* folder : {"tmp", "head"}) make_dirs(at(folder));
    write_file(keeper("head/api_key"), api_key_ + "\n", 0600);
    write_file(keeper("head/hub_token"), hub_token_ + "\n", 0600);
    for (const std::string host : {"head", "worker"}) {
      sshd_.push_back(std::make_unique<Sshd>(at("ssh-" + host), Namespaces::address(host), 22, net.in(host)));
      for (const std::string name : {"host", "other", "user"}) {
        watch.add_key(cat("an ssh key of the ", host), keeper(cat("ssh-", host, "/", name)));
      }
    }
    net.inside("head", [&] { hub = std::make_unique<test::FakeHub>(); });
    hub->set_token(hub_token_);
    for (const auto& entry : fs::directory_iterator(source_dir() + "/models/glm53-tiny")) {
      const std::string name = entry.path().filename().string();
      hub->add(kRepo, name, read_file(entry.path().string(), size_t{64} << 20), name.ends_with(".safetensors"));
    }
    write_file(at("head/config.toml"), head_config());
    make_bundle(at("bundle"));
  }
  ~TwoHosts() {
    try {
      for (const Child& agent : agents_) signal_group(agent.id, SIGTERM);
      for (const Child& agent : agents_) wait_until(agent.id.pid, std::chrono::steady_clock::now() + 20s);
      for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
    } catch (const std::exception& e) {
      FAIL_CHECK("cleaning up: " << e.what());
    }
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  std::string at(const std::string& name) const { return dir_.path() + "/" + name; }
  std::string root() const { return at("root"); }
  /// A file that exists to hold a secret.
  std::string keeper(const std::string& name) {
    keepers.insert(at(name));
    return at(name);
  }
  void start_agent(const std::string& host) {
    SpawnOptions options;
    const bool head = host == "head";
    options.argv = net.in(host, {head ? program("glm53-agent") : root() + "/opt/glm53/current/glm53-agent", "--config",
                                 head ? at("head/config.toml") : root() + "/etc/glm53/config.toml"});
    options.env = {{"PATH", "/usr/bin:/bin"}, {"HOME", at("tmp")}, {"TMPDIR", at("tmp")}};
    agents_.push_back(spawn(options));
    const std::string socket = head ? at("head/run/agent.sock") : root() + "/run/glm53/agent.sock";
    if (!wait_for([&] { return fs::exists(socket); })) throw Error(Code::stalled, cat("no agent on the ", host));
  }
  /// glm53ctl on that host.
  ProgramResult ctl(const std::string& host, const std::vector<std::string>& arguments) {
    std::vector<std::string> argv{program("glm53ctl"), "--config",
                                  host == "head" ? at("head/config.toml") : root() + "/etc/glm53/config.toml"};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    ProgramResult result = run_program(net.in(host, argv), at("tmp"));
    printed += result.output;
    return result;
  }
  ProgramResult node_add(const std::string& known = "host") {
    return ctl("head",
               {"node", "add", "root@" + Namespaces::address("worker"), "--bundle", at("bundle"), "--ssh-key",
                sshd_.back()->path("user"), "--known-hosts", sshd_.back()->path("known." + known), "--root", root()});
  }
  Json status() {
    const ProgramResult result = ctl("head", {"--json", "status"});
    return result.code == 0 ? parse_json(result.output) : Json();
  }
  bool wait_status(const std::function<bool(const Json&)>& done, std::chrono::milliseconds limit = 60s) {
    return wait_for(
        [&] {
          const Json now = status();
          return now.is_object() && done(now);
        },
        limit);
  }
  /// Status and body of a chat through the head's address, asked from that host.
  std::pair<int, std::string> chat(const std::string& from, const std::string& key) const {
    std::pair<int, std::string> answer;
    net.inside(from, [&] {
      try {
        HttpClient http(cat("http://", Namespaces::address("head"), ":", kApi), key);
        http.set_timeout(3s, 60s);
        const HttpAnswer got =
            http.request("POST", "/v1/chat/completions",
                         R"({"messages":[{"role":"user","content":"Hello!"}],"max_tokens":40,"temperature":0,)"
                         R"("chat_template_kwargs":{"enable_thinking":false}})");
        answer = {got.status, got.body};
      } catch (const Error& e) {
        answer = {0, e.what()};
      }
    });
    return answer;
  }
  const std::string& api_key() const { return api_key_; }
  /// Processes of the two hosts that the agents started, agents included.
  std::vector<pid_t> processes() const {
    std::vector<pid_t> found;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const auto pid = parse_int(entry.path().filename().string());
      if (!pid) continue;
      try {
        const std::string text = read_file(entry.path().string() + "/environ");
        if (text.find(dir_.path()) != std::string::npos) found.push_back(static_cast<pid_t>(*pid));
      } catch (const Error&) {
        continue;
      }
    }
    return found;
  }

 private:
  std::string head_config() const {
    std::string text = cat("node.role = \"head\"\nhub.endpoint = ", quoted(hub->endpoint()));
    for (const auto& [key, path] : std::map<std::string, std::string>{{"paths.state", "head/state"},
                                                                      {"paths.run", "head/run"},
                                                                      {"paths.logs", "head/logs"},
                                                                      {"api.key_file", "head/api_key"},
                                                                      {"hub.token_file", "head/hub_token"},
                                                                      {"hub.home", "head/huggingface"}}) {
      text += cat("\n", key, " = ", quoted(at(path)));
    }
    return cat(text, "\nadmin.listen = \"", Namespaces::address("head"), ":", kAdmin, "\"\nworker.admin = \"",
               Namespaces::address("worker"), ":", kAdmin, "\"\nhead.fabric_address = \"", Namespaces::address("head"),
               "\"\nworker.fabric_address = \"", Namespaces::address("worker"), "\"\napi.bind = \"",
               Namespaces::address("head"), "\"\napi.port = ", kApi, "\nmodel.repo = ", quoted(kRepo),
               "\nmodel.revision = ", quoted(test::FakeHub::commit()),
               "\nengine.backend = \"cpu\"\nhub.disk_reserve = 0\nlog.level = \"debug\"\nmemory.reserve = "
               "\"64MiB\"\nranks.orphan_timeout = \"4s\"\n"
               "ranks.collective_timeout = \"5s\"\n");
  }

  const TempDir dir_;

 public:
  SecretWatch watch;
  const Namespaces net;
  std::set<std::string> keepers;
  std::string printed;  ///< by every glm53ctl
  std::unique_ptr<test::FakeHub> hub;

 private:
  std::string api_key_, hub_token_;
  std::vector<std::unique_ptr<Sshd>> sshd_;
  std::vector<Child> agents_;
};

template <typename Texts>
std::string all_of(const Texts& texts) {
  std::string out;
  for (const std::string& text : texts) out += text + "; ";
  return out;
}

/// The worker's rank ended by itself: nobody could tell it.
bool engine_runs_on_worker(const TwoHosts& hosts) {
  const ProgramResult listed = run_program({"/sbin/ip", "netns", "pids", hosts.net.in("worker").back()}, "/tmp");
  for (const std::string& line : split(listed.output, '\n')) {
    const auto pid = parse_int(trim(line));
    if (!pid) continue;
    try {
      if (read_file(cat("/proc/", *pid, "/comm")).starts_with("glm53-engine")) return true;
    } catch (const Error&) {
      continue;
    }
  }
  return false;
}

}  // namespace

TEST_CASE("two hosts: from nothing to an answer, through a cut cable, to a stop; and no secret is anywhere" *
          where_possible("two hosts")) {
  TwoHosts hosts;
  const auto done = [&](const std::string& host, const std::vector<std::string>& arguments, const std::string& part) {
    const ProgramResult result = hosts.ctl(host, arguments);
    CAPTURE(arguments.front());
    CAPTURE(result.output);
    REQUIRE(result.code == 0);
    REQUIRE(contains(result.output, part));
  };
  hosts.start_agent("head");
  done("head", {"cluster", "init"}, "has its CA");

  // The worker: programs, configuration and unit over SSH; what systemd would do is done here.
  const ProgramResult unknown = hosts.node_add("other");
  CHECK(unknown.code == 1);
  CHECK(contains(unknown.output, "E303"));
  CHECK_FALSE(fs::exists(hosts.root()));
  const ProgramResult first = hosts.node_add();
  CAPTURE(first.output);
  REQUIRE(first.code == 0);
  hosts.start_agent("worker");
  const ProgramResult second = hosts.node_add(), third = hosts.node_add();
  CAPTURE(second.output);
  REQUIRE(second.code == 0);
  CHECK(contains(second.output, "installed already"));
  CHECK(contains(second.output, "this node is worker of cluster glm53"));
  CHECK(contains(third.output, "is a member already"));
  for (const std::string& file : {hosts.at("head/state/tls/ca.pem"), hosts.at("head/state/tls/self.pem"),
                                  hosts.root() + "/var/lib/glm53/tls/self.pem"}) {
    hosts.keepers.insert(file);
    hosts.watch.add_key(cat("the key in ", file), file);
  }

  done("head", {"download"}, test::FakeHub::commit());
  done("head", {"sync"}, "");
  const std::string blobs =
      hosts.root() + "/var/lib/glm53/huggingface/hub/models--org--glm53-tiny/snapshots/" + test::FakeHub::commit();
  for (const auto& [name, file] : hosts.hub->files(kRepo)) {
    CAPTURE(name);
    CHECK(read_file(cat(blobs, "/", name), size_t{64} << 20) == file.content);
  }
  const int64_t sent = hosts.hub->body_bytes;
  done("head", {"start"}, "");
  CHECK(hosts.hub->body_bytes == sent);
  done("head", {"status"}, "up");

  // An answer for the other host, with the key only.
  CHECK(hosts.chat("worker", "").first == 401);
  const auto hello = hosts.chat("worker", hosts.api_key());
  CHECK(contains(hello.second, "Hello! How can I help you today?"));
  // A person on the other host, with a token of one's own.
  const ProgramResult token = hosts.ctl("head", {"cluster", "token", "--role", "operator", "--name", "alice"});
  REQUIRE(token.code == 0);
  const std::string secret = token.output.substr(0, token.output.find('\n'));
  hosts.printed.erase(hosts.printed.find(secret), secret.size());  // the one place where it is to be seen
  hosts.watch.add("a join token", split(secret, '-').at(1));
  write_file(hosts.keeper("tmp/token"), secret, 0600);
  const std::string identity = hosts.keeper("tmp/identity.pem"), url = cat("https://10.53.0.1:", kAdmin);
  done("worker",
       {"--identity", identity, "cluster", "login", cat("10.53.0.1:", kAdmin), "--token", hosts.at("tmp/token")},
       "you are operator alice");
  hosts.watch.add_key("a person's key", identity);
  done("worker", {"--identity", identity, "--url", url, "status"}, "up");

  // The cable is cut. Unknown is not dead: it is said within twelve seconds, and the worker ends its rank by itself.
  const int64_t generation = hosts.status().at("cluster").at("generation").get<int64_t>();
  hosts.net.set_link("worker", false);
  CHECK(hosts.wait_status([](const Json& now) { return now["nodes"][1]["reachable"] == false; }, 12s));
  CHECK(contains(hosts.ctl("head", {"status"}).output, "does not answer"));
  CHECK(wait_for([&] { return !engine_runs_on_worker(hosts); }, 20s));
  CHECK(hosts.chat("worker", hosts.api_key()).first == 0);

  hosts.net.set_link("worker", true);
  CHECK(hosts.wait_status([&](const Json& now) {
    return now["cluster"]["state"] == "up" && now["cluster"]["generation"].get<int64_t>() > generation;
  }));
  CHECK(contains(hosts.chat("worker", hosts.api_key()).second, "Hello! How can I help you today?"));
  done("head", {"logs", "both", "-n", "200"}, "");
  done("head", {"stop"}, "");
  CHECK(hosts.wait_status([](const Json& now) { return now["cluster"]["state"] == "down"; }));
  CHECK(wait_for([&] { return hosts.processes().size() == 2; }, 20s));

  CHECK(hosts.watch.rounds() > 10);
  CHECK(all_of(hosts.watch.in_processes()) == "");
  CHECK(all_of(hosts.watch.in_text("what glm53ctl printed", hosts.printed)) == "");
  CHECK(all_of(hosts.watch.in_files(hosts.at(""), hosts.keepers)) == "");
}

TEST_CASE("the watch over secrets sees them in command lines, environments, files and databases") {
  const TempDir dir;
  const std::string secret = random_hex(16);
  SecretWatch watch;
  watch.add("the secret", secret);
  CHECK(all_of(watch.in_processes()) == "");
  SpawnOptions options;
  options.argv = {"/bin/sh", "-c", "sleep 30; exit 0", secret};
  const Child told = spawn(options);
  CHECK(wait_for([&] { return contains(all_of(watch.in_processes()), "the secret in the cmdline of sh"); }, 20s));
  options.argv = {"/bin/sh", "-c", "sleep 30; exit 0"};
  options.env["NAME"] = secret;
  const Child knows = spawn(options);
  CHECK(wait_for([&] { return contains(all_of(watch.in_processes()), "the secret in the environ of s"); }, 20s));
  for (const Child* child : {&told, &knows}) {
    signal_group(child->id, SIGKILL);
    wait_until(child->id.pid, std::chrono::steady_clock::now() + 10s);
  }
  write_file(dir.path() + "/state.db-wal", std::string("\0\1", 2) + secret + std::string(1, '\0'));
  write_file(dir.path() + "/key", secret);
  CHECK(all_of(watch.in_files(dir.path(), {dir.path() + "/key"})) ==
        cat("the secret in ", dir.path(), "/state.db-wal; "));
}
