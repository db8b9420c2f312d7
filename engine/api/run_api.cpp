// The process around ApiServer: configuration, notify, signals, exit code.
#include <chrono>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sys/signalfd.h>

#include "common/config.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/rank_contract.h"
#include "common/socket.h"
#include "common/strings.h"
#include "engine/api/api.h"
#include "engine/api/api_server.h"

namespace glm53 {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kDrainLimit{30};

/// SIGTERM and SIGINT as a descriptor; blocked in every thread that is started afterwards.
UniqueFd stop_signals() {
  sigset_t set;
  if (sigemptyset(&set) != 0 || sigaddset(&set, SIGTERM) != 0 || sigaddset(&set, SIGINT) != 0 ||
      pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) {
    throw_errno(Code::internal, "cannot block signals");
  }
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_errno(Code::internal, "cannot create a signalfd");
  return fd;
}

bool signalled(int fd, std::chrono::milliseconds wait) {
  pollfd p{fd, POLLIN, 0};
  if (::poll(&p, 1, static_cast<int>(wait.count())) <= 0) return false;
  signalfd_siginfo info;
  return ::read(fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info);
}

void serve(int config_fd, Notifier& notifier) {
  notifier.phase(Phase::init);
  const UniqueFd signals = stop_signals();
  const ApiConfig config = parse_api_config(read_all(config_fd));
  const Config keys = Config::from_json(parse_json(config.config_json), "the API process's configuration");
  log::init("api", log::parse_level(keys.text("log.level")));
  api::ApiServer server(config, [&notifier] { notifier.watchdog(); });
  notifier.phase(Phase::ready);
  notifier.ready();

  while (!signalled(signals.get(), std::chrono::seconds(60))) {
  }
  log::info("stopping: unfinished requests have 30 s");
  Notice stopping;
  stopping.stopping = true;
  notifier.send(stopping);
  notifier.phase(Phase::draining);
  server.drain();
  const auto deadline = Clock::now() + kDrainLimit;
  bool again = false;
  while (server.unfinished() != 0 && Clock::now() < deadline && !again) {
    again = signalled(signals.get(), std::chrono::milliseconds(50));
  }
  server.stop(again ? std::chrono::milliseconds(0) : std::chrono::milliseconds(500));
}

}  // namespace

int run_api(int config_fd) {
  Notifier notifier;
  try {
    serve(config_fd, notifier);
    log::info("stopped");
    return 0;
  } catch (const Error& e) {
    log::error(e.line());
    notifier.error(e.line());
    return rank_exit(e.code());
  } catch (const std::exception& e) {
    log::error(e.what());
    notifier.error(e.what());
    return rank_exit(Code::internal);
  }
}

}  // namespace glm53
