// A small child that keeps the rank contract, as a rank or as the API process, and dies on request. Its folder
// (draft.path, else model.path) holds the requests: a file die.NAME.PHASE with "kill", "hang", "ignore" or an exit code
// is obeyed once, always.NAME.PHASE every time.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <poll.h>
#include <signal.h>
#include <string>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "common/config.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/rank_contract.h"
#include "common/socket.h"
#include "common/strings.h"

namespace {

using namespace glm53;
using namespace std::chrono_literals;

std::atomic<bool> told_to_stop{false};
void on_term(int) {
  told_to_stop = true;
}

struct Self {
  std::string name, folder, admin_socket;
  int rank = -1, size = 1;
  uint64_t generation = 0;
};

bool exists(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0;
}

void misbehave(const Self& self, std::string_view where, Notifier& notifier) {
  for (const char* when : {"die", "always"}) {
    const std::string path = cat(self.folder, "/", std::string_view(when), ".", self.name, ".", where);
    if (!exists(path)) continue;
    const std::string what(trim(read_file(path)));
    if (when == std::string_view("die")) ::unlink(path.c_str());
    if (what == "kill") ::kill(::getpid(), SIGKILL);
    if (what == "ignore") ::signal(SIGTERM, SIG_IGN);
    if (what == "hang") {
      while (!told_to_stop) std::this_thread::sleep_for(10ms);
      ::_exit(0);
    }
    if (const auto code = parse_int(what)) {
      notifier.error(cat("told to exit with ", *code));
      ::_exit(static_cast<int>(*code));
    }
  }
}

std::string answer(const Self& self, const std::string& line) {
  const auto request = parse_json(line);
  const std::string what = request.value("do", "");
  const std::string log = cat(self.folder, "/asked.", self.name);
  if (what != "counters") write_file(log, (exists(log) ? read_file(log) : std::string()) + what + "\n");
  if (what == "canary") return R"({"ok":true,"text":"one two","tokens":2})";
  if (what == "counters")
    return R"({"ok":true,"step":1,"memory_bytes":1,"running":0,"waiting":0,"generated_tokens":7,"gate_open":true,"connected":true,"model_digest":"d1"})";
  return R"({"ok":true})";
}

/// Answers one waiting caller, or waits 20 ms.
void serve(const Self& self, const UniqueFd& listener) {
  const UniqueFd client = accept_until(listener.get(), std::chrono::steady_clock::now() + 20ms);
  if (!client) return;
  std::string line;
  char c = 0;
  while (::read(client.get(), &c, 1) == 1 && c != '\n') line += c;
  if (line.empty()) return;
  const std::string text = answer(self, line) + "\n";
  send_all(client.get(), std::as_bytes(std::span(text)));
}

int run(const Self& self) {
  Notifier notifier;
  const UniqueFd listener = listen_unix(self.admin_socket);
  if (self.rank >= 0) {
    const std::string met = cat(self.folder, "/met.", self.generation);
    for (const Phase phase :
         {Phase::exec, Phase::init, Phase::rendezvous, Phase::comm_init, Phase::load_target, Phase::warmup}) {
      notifier.phase(phase);
      std::cerr << "phase " << name(phase) << std::endl;
      misbehave(self, name(phase), notifier);
      if (phase == Phase::load_target) notifier.progress(1, 2);
      if (phase == Phase::rendezvous && self.rank == 0) write_file(met, "");
      while (phase == Phase::rendezvous && self.rank != 0 && !exists(met) && !told_to_stop)
        std::this_thread::sleep_for(5ms);
      if (told_to_stop) return 0;
      std::this_thread::sleep_for(5ms);
    }
  }
  notifier.ready();
  auto next = std::chrono::steady_clock::now();
  while (!told_to_stop) {
    misbehave(self, "ready", notifier);
    serve(self, listener);
    if (std::chrono::steady_clock::now() < next) continue;
    notifier.watchdog();
    next += 200ms;
  }
  ::unlink(self.admin_socket.c_str());
  return 0;
}

Self read_self(const std::string& kind) {
  const std::string document = read_all(3);
  Self self;
  std::string settings;
  if (kind == "api") {
    const ApiConfig config = parse_api_config(document);
    self.name = "api";
    self.admin_socket = config.admin_socket;
    settings = config.config_json;
  } else {
    const RankConfig config = parse_rank_config(document);
    self.name = cat("rank", config.rank);
    self.admin_socket = config.admin_socket;
    self.rank = config.rank;
    self.size = config.size;
    self.generation = config.generation;
    settings = config.config_json;
  }
  const Config config = Config::from_json(parse_json(settings), "child");
  self.folder = config.text(config.text("draft.path").empty() ? "model.path" : "draft.path");
  return self;
}

}  // namespace

int main(int argc, char** argv) {
  ::signal(SIGTERM, on_term);
  ::signal(SIGPIPE, SIG_IGN);
  try {
    return run(read_self(argc > 1 ? argv[1] : "rank"));
  } catch (const glm53::Error& e) {
    std::cerr << e.line() << std::endl;
    return glm53::rank_exit(e.code());
  }
}
