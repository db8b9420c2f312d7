#include "tests/e2e/cluster.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <iostream>
#include <poll.h>
#include <signal.h>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53::e2e {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::map<std::string, std::string> environment(const std::string& temp_dir) {
  const char* path = std::getenv("PATH");
  return {{"PATH", path != nullptr ? path : "/usr/bin:/bin"}, {"HOME", temp_dir}, {"TMPDIR", temp_dir}};
}

/// Reads a child's output to its end, or until the limit.
std::string drain(int fd, Clock::time_point limit) {
  std::string out;
  std::array<char, 65536> piece{};
  while (Clock::now() < limit) {
    pollfd ready{fd, POLLIN, 0};
    if (::poll(&ready, 1, 100) < 0 && errno != EINTR) break;
    const ssize_t n = ::read(fd, piece.data(), piece.size());
    if (n == 0) break;
    if (n > 0) out.append(piece.data(), static_cast<size_t>(n));
    if (n < 0 && errno != EAGAIN && errno != EINTR) break;
  }
  return out;
}

std::string quoted(const std::string& text) {
  return cat("\"", text, "\"");
}

/// A file of /proc, which may vanish at any time.
std::string proc_text(const fs::path& path) {
  try {
    return read_file(path.string());
  } catch (const Error&) {
    return {};
  }
}

Json chat_body(const std::string& prompt, int max_tokens, bool stream) {
  return {{"messages", Json::array({{{"role", "user"}, {"content", prompt}}})},
          {"temperature", 0},
          {"max_tokens", max_tokens},
          {"stream", stream},
          {"chat_template_kwargs", {{"enable_thinking", false}}}};
}

}  // namespace

TempDir::TempDir() {
  std::string pattern = "/tmp/glm53-e2e-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) throw_errno(Code::unavailable, pattern);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string program(const std::string& name) {
  return name == "fake_rank" ? cat(GLM53_BINARY_DIR, "/tests/fake_rank") : cat(GLM53_BINARY_DIR, "/bin/", name);
}

std::string source_dir() {
  return GLM53_SOURCE_DIR;
}

void make_bundle(const std::string& dir) {
  fs::create_directories(dir + "/systemd");
  write_file(dir + "/.glm53-bundle", "");
  for (const char* name : {"glm53-agent", "glm53ctl", "glm53-engine"}) {
    write_file(cat(dir, "/", std::string_view(name)), cat("#!/bin/sh\nexec ", program(name), " \"$@\"\n"), 0755);
  }
  write_file(dir + "/systemd/glm53-agent.service.in", read_file(source_dir() + "/systemd/glm53-agent.service.in"));
}

ProgramResult run_program(const std::vector<std::string>& argv, const std::string& temp_dir,
                          std::chrono::seconds limit) {
  SpawnOptions options;
  options.argv = argv;
  options.env = environment(temp_dir);
  const auto until = Clock::now() + limit;
  const Child child = spawn(options);
  ProgramResult result;
  result.output = drain(child.output.get(), until);
  const auto status = wait_until(child.id.pid, until);
  if (!status) {
    signal_group(child.id, SIGKILL);
    wait_until(child.id.pid, Clock::now() + 10s);
    throw Error(Code::stalled, cat(argv.front(), " did not end; so far: ", result.output));
  }
  result.code = status->signal != 0 ? 128 + status->signal : status->code;
  return result;
}

uint16_t free_port(const std::string& address) {
  return local_port(listen_tcp(address, 0).get());
}

bool wait_for(const std::function<bool()>& done, std::chrono::milliseconds limit) {
  const auto until = Clock::now() + limit;
  while (!done()) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(50ms);
  }
  return true;
}

LocalCluster::LocalCluster(ClusterOptions options) : temp_(dir_.path() + "/tmp") {
  make_dirs(temp_);
  api_port_ = free_port("127.0.0.1");
  for (const std::string node : {"head", "worker"}) {
    make_dirs(cat(dir_.path(), "/", node));
    tokens_[node] = random_hex(16);
    watch_.add(cat("the admin token of the ", node), tokens_[node]);
    write_file(cat(dir_.path(), "/", node, "/token"), tokens_[node], 0600);
    auto& lines = node == "head" ? options.head : options.worker;
    if (options.fake_rank) lines.try_emplace("engine.rank_path", quoted(program("fake_rank")));
  }
  const std::string worker_admin = cat("127.0.0.2:", free_port("127.0.0.2"));
  options.worker.try_emplace("admin.listen", quoted(worker_admin));
  options.head.try_emplace("admin.listen", quoted(cat("127.0.0.1:", free_port("127.0.0.1"))));
  options.head.try_emplace("worker.admin", quoted(worker_admin));
  options.head.try_emplace("worker.token_file", quoted(dir_.path() + "/worker/token"));
  options.head.try_emplace("ranks.port", cat(free_port("127.0.0.1")));
  options.head.try_emplace("model.path", quoted(source_dir() + "/models/glm53-tiny"));
  options.head.try_emplace("memory.reserve", quoted("64MiB"));
  options.head.try_emplace("api.port", cat(api_port_));
  write_config("head", options.head);
  write_config("worker", options.worker);
  start_agent("worker");
  start_agent("head");
}

LocalCluster::~LocalCluster() {
  try {
    for (const auto& [node, child] : agents_) signal_group(child.id, SIGTERM);
    std::erase_if(agents_,
                  [](const auto& entry) { return wait_until(entry.second.id.pid, Clock::now() + 10s).has_value(); });
    for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
    for (const auto& [node, child] : agents_) wait_until(child.id.pid, Clock::now() + 5s);
    check_secrets();
  } catch (const std::exception& e) {
    std::cerr << "cleaning up: " << e.what() << "\n";
  }
}

void LocalCluster::check_secrets() const {
  for (const std::string& found : watch_.in_processes()) FAIL_CHECK(found);
  std::set<std::string> keepers;
  for (const auto& [node, token] : tokens_) keepers.insert(cat(dir_.path(), "/", node, "/token"));
  for (const std::string& found : watch_.in_files(dir_.path(), keepers)) FAIL_CHECK(found);
}

void LocalCluster::write_config(const std::string& node, const std::map<std::string, std::string>& lines) const {
  const std::string base = cat(dir_.path(), "/", node);
  std::string text = cat("node.role = ", quoted(node), "\npaths.state = ", quoted(base + "/state"),
                         "\npaths.run = ", quoted(base + "/run"), "\npaths.logs = ", quoted(base + "/logs"),
                         "\nadmin.token_file = ", quoted(base + "/token"), "\n");
  for (const auto& [key, value] : lines) text += cat(key, " = ", value, "\n");
  write_file(config(node), text);
}

void LocalCluster::start_agent(const std::string& node) {
  SpawnOptions options;
  options.argv = {program("glm53-agent"), "--config", config(node)};
  options.env = environment(temp_);
  make_dirs(cat(dir_.path(), "/", node, "/logs"));
  const UniqueFd log(
      ::open(cat(dir_.path(), "/", node, "/agent.out").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  options.output_fd = log.get();
  agents_.insert_or_assign(node, spawn(options));
  const auto answers = [&] {
    if (try_wait(agent_pid(node))) {
      agents_.erase(node);
      throw Error(Code::internal,
                  cat("the agent of the ", node, " ended: ", read_file(cat(dir_.path(), "/", node, "/agent.out"))));
    }
    try {
      return HttpClient(cat("unix:", run_dir(node), "/agent.sock")).request("GET", "/admin/v1/version").status == 200;
    } catch (const Error&) {
      return false;
    }
  };
  if (!wait_for(answers)) throw Error(Code::stalled, cat("the agent of the ", node, " does not answer"));
}

void LocalCluster::stop_agent(const std::string& node) {
  signal_group(agents_.at(node).id, SIGTERM);
  if (!wait_until(agent_pid(node), Clock::now() + 30s))
    throw Error(Code::stalled, cat("the agent of the ", node, " does not end"));
  agents_.erase(node);
}

void LocalCluster::kill_agent(const std::string& node) {
  ::kill(agent_pid(node), SIGKILL);
  wait_until(agent_pid(node), Clock::now() + 10s);
  agents_.erase(node);
}

ProgramResult LocalCluster::ctl(const std::vector<std::string>& arguments) const {
  std::vector<std::string> argv{program("glm53ctl"), "--config", config("head")};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return run_program(argv, temp_);
}

Child LocalCluster::spawn_ctl(const std::vector<std::string>& arguments) const {
  SpawnOptions options;
  options.argv = {program("glm53ctl"), "--config", config("head")};
  options.argv.insert(options.argv.end(), arguments.begin(), arguments.end());
  options.env = environment(temp_);
  return spawn(options);
}

void LocalCluster::up() {
  const auto result = ctl({"start"});
  if (result.code != 0) throw Error(Code::internal, cat("start ended with ", result.code, ": ", result.output));
  if (state() != "up") throw Error(Code::internal, cat("started, but the state is ", state()));
}

Json LocalCluster::status() const {
  try {
    return parse_json(HttpClient(cat("unix:", run_dir("head"), "/agent.sock")).request("GET", "/admin/v1/status").body);
  } catch (const Error&) {
    return nullptr;
  }
}

bool LocalCluster::wait_status(const std::function<bool(const Json&)>& done) const {
  return wait_for([&] {
    const Json now = status();
    return now.is_object() && done(now);
  });
}

bool LocalCluster::wait_up(int64_t generation_above) const {
  return wait_status([&](const Json& now) {
    return now["cluster"].value("state", "") == "up" &&
           now["cluster"].value("generation", int64_t{0}) > generation_above;
  });
}

std::string LocalCluster::state() const {
  const Json now = status();
  return now.is_object() ? now["cluster"].value("state", "") : "";
}

int64_t LocalCluster::generation() const {
  const Json now = status();
  return now.is_object() ? now["cluster"].value("generation", int64_t{0}) : 0;
}

Json LocalCluster::process(const std::string& name) const {
  const Json now = status();
  if (!now.is_object()) return nullptr;
  for (const auto& node : now["nodes"]) {
    for (const auto& one : node["processes"]) {
      if (one.value("name", "") == name) return one;
    }
  }
  return nullptr;
}

pid_t LocalCluster::process_pid(const std::string& name) const {
  const Json one = process(name);
  if (!one.is_object() || one.value("state", "") == "exited" || !one["pid"].is_number()) return 0;
  return one["pid"].get<pid_t>();
}

std::string LocalCluster::api_url() const {
  return cat("http://127.0.0.1:", api_port_);
}

int LocalCluster::api_get(const std::string& path) const {
  try {
    return HttpClient(api_url()).request("GET", path).status;
  } catch (const Error&) {
    return 0;
  }
}

std::string LocalCluster::chat(const std::string& prompt, int max_tokens) const {
  HttpClient http(api_url());
  http.set_timeout(5s, 120s);
  const auto answer = http.request("POST", "/v1/chat/completions", dump(chat_body(prompt, max_tokens, false)));
  if (answer.status != 200) return cat("HTTP ", answer.status, ": ", answer.body);
  const Json json = parse_json(answer.body);
  const Json& content = json.at("choices").at(0).at("message").at("content");
  return content.is_string() ? content.get<std::string>() : "";
}

std::string LocalCluster::stream_chat(const std::string& prompt, int max_tokens,
                                      const std::function<void(const std::string&)>& each) const {
  return stream(chat_body(prompt, max_tokens, true), 120s, each);
}

std::string LocalCluster::stream(const Json& body, std::chrono::milliseconds patience,
                                 const std::function<void(const std::string&)>& each) const {
  HttpClient http(api_url());
  http.set_timeout(5s, patience);
  std::string whole, finish;
  SseParser parser([&](std::string_view, std::string_view data) {
    if (data == "[DONE]") return;
    const Json event = parse_json(data);
    if (event.contains("error")) throw Error(Code::unavailable, cat("in the stream: ", data));
    if (!event.contains("choices") || event["choices"].empty()) return;
    const Json& choice = event["choices"][0];
    if (choice["finish_reason"].is_string()) finish = choice["finish_reason"].get<std::string>();
    if (!choice["delta"].contains("content") || !choice["delta"]["content"].is_string()) return;
    const auto piece = choice["delta"]["content"].get<std::string>();
    if (piece.empty()) return;
    whole += piece;
    each(piece);
  });
  const auto answer = http.stream("POST", "/v1/chat/completions", dump(body), [&](std::string_view bytes) {
    parser.feed(bytes);
    return true;
  });
  if (answer.status != 200) throw Error(Code::unavailable, cat("HTTP ", answer.status, ": ", answer.body));
  if (finish.empty()) throw Error(Code::unavailable, cat("the stream ended without a finish reason after: ", whole));
  return whole;
}

void LocalCluster::set_fake(const Json& rules) const {
  for (const std::string node : {"head", "worker"}) {
    make_dirs(run_dir(node));
    write_file(run_dir(node) + "/fake_rank.json", dump(rules));
  }
}

std::vector<pid_t> LocalCluster::processes() const {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const auto pid = parse_int(entry.path().filename().string());
    if (!pid) continue;
    const bool ours = proc_text(entry.path() / "environ").find(dir_.path()) != std::string::npos;
    if (ours && identify(static_cast<pid_t>(*pid))) found.push_back(static_cast<pid_t>(*pid));
  }
  return found;
}

}  // namespace glm53::e2e
