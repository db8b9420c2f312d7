// Head and worker in this process, with real children.
#pragma once

#include <memory>
#include <signal.h>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "agent/api/agent.h"
#include "common/error.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/socket.h"
#include "common/strings.h"
#include "tests/temp_dir.h"
#include "tests/unit/agent/eventually.h"

namespace glm53::test {

using Json = nlohmann::ordered_json;

inline uint16_t free_port() {
  const UniqueFd fd = listen_tcp("127.0.0.1", 0);
  return local_port(fd.get());
}

/// A safetensors file of one tensor.
inline std::string one_tensor(size_t bytes, const std::string& seed) {
  const std::string header = cat(R"({"t":{"dtype":"U8","shape":[)", bytes, R"(],"data_offsets":[0,)", bytes, "]}}");
  std::string out;
  for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(header.size() >> shift & 0xff);
  return out + header + seed + std::string(bytes - seed.size(), 'w');
}

class TestCluster {
 public:
  explicit TestCluster(bool with_worker = true, const std::string& more = "", const std::string& more_worker = "",
                       const std::string& admin = "")
      : with_worker_(with_worker) {
    make_dirs(dir_ / "model");
    write_file(dir_ / "token", "the-token-of-the-tests\n", 0600);
    const uint16_t port = free_port();
    const std::string common = cat("[engine]\npath = \"", GLM53_BINARY_DIR, "/tests/glm53-test-child\"\nrank_path = \"",
                                   GLM53_BINARY_DIR, "/tests/glm53-test-child\"\nbackend = \"cpu\"\n");
    const auto paths = [&](const std::string& node) {
      return cat("[paths]\nstate = \"", node, "/state\"\nrun = \"", node, "/run\"\nlogs = \"", node, "/logs\"\n");
    };
    const std::string token = "token_file = \"token\"\n" + admin;
    admin_port_ = free_port();
    // Over TLS the worker joins at the head's own address.
    const std::string listen = admin.empty() ? "" : cat("listen = \"127.0.0.1:", admin_port_, "\"\n");
    write_file(
        dir_ / "head.toml",
        cat("[node]\nrole = \"head\"\n", paths("head"), "[admin]\n", token, listen, common,
            "[model]\npath = \"model\"\n", "[topology]\nranks = [",
            with_worker ? "\"head:0\", \"worker:0\"" : "\"head:0\"", "]\n",
            with_worker ? cat("[worker]\nadmin = \"127.0.0.1:", port, "\"\n") : std::string(),
            // Ports of its own: the checks before a start look at them, and other clusters may run on this machine.
            "[api]\nport = ", free_port(), "\n[ranks]\nport = ", free_port(),
            "\nstop_grace = \"3s\"\norphan_timeout = \"2s\"\nwatchdog = \"20s\"\n", more));
    write_file(dir_ / "worker.toml", cat("[node]\nrole = \"worker\"\n", paths("worker"),
                                         "[admin]\nlisten = \"127.0.0.1:", port, "\"\n", token, common, more_worker));
    if (with_worker) start_worker();
    start_head();
  }
  ~TestCluster() {
    try {
      if (!head_) start_head();
      put({{"state", "stopped"}, {"drain_ms", 0}, {"preempt", true}});
      CHECK(reaches("down"));
    } catch (const std::exception& e) {
      FAIL_CHECK(e.what());
    }
    head_.reset();
    if (worker_) worker_->stop(true);
  }

  static std::unique_ptr<agent::Agent> launch(const std::string& config) {
    auto agent = std::make_unique<agent::Agent>(config);
    agent->lock();
    agent->open();
    agent->start();
    return agent;
  }
  void start_head() { head_ = launch(dir_ / "head.toml"); }
  void start_worker() { worker_ = launch(dir_ / "worker.toml"); }
  void end_head() { head_.reset(); }
  void end_worker() { worker_.reset(); }
  agent::Agent& worker() { return *worker_; }

  HttpAnswer ask(const std::string& method, const std::string& path, const std::string& body = "",
                 bool worker = false) {
    HttpClient client("unix:" + (dir_ / (worker ? "worker/run/agent.sock" : "head/run/agent.sock")));
    client.set_timeout(std::chrono::seconds(5), std::chrono::seconds(30));
    return client.request(method, "/admin/v1" + path, body);
  }
  Json get(const std::string& path, bool worker = false) {
    const HttpAnswer answer = ask("GET", path, "", worker);
    INFO(answer.body);
    REQUIRE(answer.status == 200);
    return parse_json(answer.body);
  }
  Json put(const Json& wanted, int status = 0) {
    const HttpAnswer answer = ask("PUT", "/wanted", dump(wanted));
    if (status != 0) CHECK(answer.status == status);
    return parse_json(answer.body);
  }
  std::string state() { return get("/status")["cluster"]["state"].get<std::string>(); }
  uint64_t generation() { return get("/status")["cluster"]["generation"].get<uint64_t>(); }
  bool reaches(const std::string& wanted) {
    return eventually([&] { return state() == wanted; });
  }
  /// Process of the newest generation.
  Json process(const std::string& name) {
    Json found;
    const Json status = get("/status");
    for (const Json& node : status["nodes"]) {
      for (const Json& p : node["processes"]) {
        if (p["name"] == name) found = p;
      }
    }
    return found;
  }
  /// The process id that status names, 0 while the process is not running.
  pid_t pid(const std::string& name) {
    const Json one = process(name)["pid"];
    return one.is_number() ? one.get<pid_t>() : 0;
  }
  /// Kills it once its id is known; 0 would be our own process group.
  bool kill(const std::string& name) {
    pid_t found = 0;
    return eventually([&] { return (found = pid(name)) > 0; }) && ::kill(found, SIGKILL) == 0;
  }
  void request(const std::string& what, const std::string& act) { write_file(dir_ / ("model/" + what), act); }
  const test::TempDir& dir() const { return dir_; }
  std::string head_address() const { return cat("127.0.0.1:", admin_port_); }
  /// A token of the head, as glm53ctl cluster token asks for one.
  std::string token(const std::string& role, const std::string& name) {
    const HttpAnswer answer = ask("POST", "/cluster/tokens", dump({{"role", role}, {"name", name}}));
    REQUIRE(answer.status == 200);
    return parse_json(answer.body)["token"].get<std::string>();
  }
  /// The worker joins; the answer.
  HttpAnswer enter(const std::string& token) {
    return ask("POST", "/cluster/enter", dump({{"head", head_address()}, {"token", token}}), true);
  }

 private:
  test::TempDir dir_;
  uint16_t admin_port_ = 0;
  bool with_worker_;
  std::unique_ptr<agent::Agent> head_, worker_;
};

inline const Json kRunning{{"state", "running"}};

}  // namespace glm53::test
