// glm53-agent: brings its node to the wanted state and keeps it there.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <poll.h>
#include <signal.h>
#include <span>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <sys/signalfd.h>
#include <systemd/sd-daemon.h>

#include "agent/api/agent.h"
#include "agent/api/preflight_run.h"
#include "agent/hub/command.h"
#include "agent/image/command.h"
#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"
#include "common/version.h"

namespace {

using namespace glm53;

/// Exit codes of the agent (docs/operating.md).
constexpr int kFailed = 1, kConfig = 2, kStateInUse = 73, kAddressInUse = 74;

/// Signals as a descriptor; blocked before any thread starts, so that none is interrupted.
UniqueFd watch_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int s : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, s);
  if (pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) throw_errno(Code::internal, "cannot block signals");
  if (signal(SIGPIPE, SIG_IGN) == SIG_ERR) throw_errno(Code::internal, "cannot ignore SIGPIPE");
  UniqueFd fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_errno(Code::internal, "cannot watch signals");
  return fd;
}

/// The next signal, or 0 after `ms`.
int next_signal(const UniqueFd& signals, int ms) {
  pollfd p{signals.get(), POLLIN, 0};
  if (poll(&p, 1, ms) <= 0) return 0;
  signalfd_siginfo info{};
  if (read(signals.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return 0;
  return static_cast<int>(info.ssi_signo);
}

/// Until SIGTERM or SIGINT. systemd hears READY, a status line, and WATCHDOG as long as the main loop answers.
void serve(agent::Agent& program, const UniqueFd& signals) {
  sd_notify(0, "READY=1");
  std::string shown;
  while (true) {
    switch (next_signal(signals, 1000)) {
      case SIGTERM:
      case SIGINT:
        sd_notify(0, "STOPPING=1");
        return;
      case SIGHUP:
        program.reload();
        break;
      default:
        break;
    }
    program.tend();
    // The status comes from the driver under its lock: a loop that hangs starves the watchdog.
    const std::string line = program.status_line();
    sd_notify(0, cat("WATCHDOG=1", line == shown ? "" : "\nSTATUS=" + line).c_str());
    shown = line;
  }
}

int run(const std::string& config, bool stop_on_exit) {
  const UniqueFd signals = watch_signals();
  agent::Agent program(config);
  log::init("agent", log::parse_level(program.settings().log_level));
  try {
    program.lock();
  } catch (const Error& e) {
    if (e.code() != Code::busy) throw;
    std::cerr << "glm53-agent: " << e.line() << "\n";
    return kStateInUse;
  }
  try {
    program.open();
  } catch (const Error& e) {
    if (e.code() != Code::busy) throw;
    std::cerr << "glm53-agent: " << e.line() << "\n";
    return kAddressInUse;
  }
  program.start();
  serve(program, signals);
  program.stop(stop_on_exit);
  return 0;
}

int check(const std::string& config) {
  const Config parsed = Config::load(config);
  (void)agent::agent_settings(parsed);
  if (parsed.text("node.role") == "head") (void)agent::make_effective(parsed, {});
  std::cout << config << ": ok\n";
  return 0;
}

CLI::App* add_download(CLI::App& app, hub::CommandOptions& o) {
  CLI::App* const download = app.add_subcommand("download", "Fetch a repository into the Hugging Face cache and end");
  download->add_option("repo", o.what, "ORGANISATION/NAME[@REVISION]; empty: model.repo of the configuration");
  download->add_option("--config", o.config, "Configuration file");
  download->add_option("--cache", o.cache, "The hub cache (default: hub.home, HF_HUB_CACHE, ~/.cache/huggingface/hub)");
  download->add_option("--include", o.include, "Only files that match (glob, repeatable)")->allow_extra_args(false);
  download->add_option("--exclude", o.exclude, "No files that match (glob, repeatable)")->allow_extra_args(false);
  download->add_option("--limit-rate", o.limit_rate, "Bytes a second, such as 200M");
  download->add_flag("--offline", o.offline, "Open no connection: say whether the cache is complete");
  download->add_flag("--verify", o.verify, "Hash again what is there");
  download->add_flag("--dry-run", o.dry_run, "Say what would be fetched");
  download->add_flag("--no-env", o.no_env, "Do not look at HF_HOME and other variables");
  download->add_flag("--json", o.json, "Print JSON lines");
  return download;
}

CLI::App* add_engine(CLI::App& app, image::CommandOptions& o) {
  CLI::App* const engine =
      app.add_subcommand("engine", "Install, choose and check engine bundles of this node, and end");
  engine->add_option("action", o.action, "install, list, use, rollback, verify, gc, import or export")->required();
  engine->add_option("what", o.what, "Image or digest; empty: engine.image of the configuration, or all");
  engine->add_option("--file", o.file, "Of import and export: a tar with an OCI layout");
  engine->add_option("--config", o.config, "Configuration file");
  engine->add_option("--store", o.store, "Where bundles lie (default: engine.store)");
  engine->add_flag("--use", o.use, "What was installed becomes the active one");
  engine->add_flag("--json", o.json, "Print JSON lines");
  return engine;
}

/// The report of GET /admin/v1/preflight with this node alone.
int run_preflight(const std::string& config, bool deep) {
  const preflight::NodeResult result = agent::check_file(config, deep);
  std::cout << preflight::report_text(std::span(&result, 1)) << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"glm53-agent brings its node to the wanted state and keeps it there."};
  app.set_version_flag("--version", std::string(glm53::version()));
  app.require_subcommand(0, 1);
  std::string config = "/etc/glm53/config.toml";
  bool stop_on_exit = false;
  app.add_option("--config", config, "Configuration file")->capture_default_str();
  app.add_flag("--stop-on-exit", stop_on_exit,
               "Stop ranks and the API process at the end, instead of leaving them to the next agent");
  CLI::App* const checks = app.add_subcommand("config-check", "Check the configuration file and end");
  checks->add_option("--config", config, "Configuration file")->capture_default_str();
  bool deep = false;
  CLI::App* const preflights = app.add_subcommand("preflight", "Do the checks before a start on this node, print JSON");
  preflights->add_option("--config", config, "Configuration file")->capture_default_str();
  preflights->add_flag("--deep", deep, "Also the probes that take long or load the devices");
  hub::CommandOptions download_options;
  CLI::App* const downloads = add_download(app, download_options);
  image::CommandOptions engine_options;
  CLI::App* const engines = add_engine(app, engine_options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? 0 : kConfig;
  }
  try {
    if (*downloads) return hub::download_command(download_options);
    if (*engines) return image::engine_command(engine_options);
    if (*preflights) return run_preflight(config, deep);
    return *checks ? check(config) : run(config, stop_on_exit);
  } catch (const glm53::Error& e) {
    std::cerr << "glm53-agent: " << e.line() << "\n";
    return e.code() == glm53::Code::config || e.code() == glm53::Code::usage ? kConfig : kFailed;
  } catch (const std::exception& e) {
    std::cerr << "glm53-agent: " << e.what() << "\n";
    return kFailed;
  }
}
