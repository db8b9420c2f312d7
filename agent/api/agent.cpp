#include "agent/api/agent.h"

#include <filesystem>
#include <system_error>
#include <thread>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"
#include "common/version.h"

namespace glm53::agent {
namespace {

using std::chrono::milliseconds;
constexpr const char* kLimitsKey = "rank_config";
/// Beyond the grace of the slowest stop, for what the reconciler does in between.
constexpr milliseconds kStopMargin{15'000};

}  // namespace

Agent::Agent(const std::string& config_path) : file_(config_path), settings_(agent_settings(file_.config())) {}

Agent::~Agent() {
  stop(false);
}

void Agent::lock() {
  lock_ = std::make_unique<state::DirectoryLock>(state::DirectoryLock::acquire(settings_.state_dir));
  // Two agents with one run folder would adopt each other's processes.
  if (settings_.run_dir != settings_.state_dir) {
    run_lock_ = std::make_unique<state::DirectoryLock>(state::DirectoryLock::acquire(settings_.run_dir));
  }
}

void Agent::open() {
  settings_.trust = std::make_shared<trust::Trust>(settings_.trust_dir, settings_.role == "head");
  db_ = state::Database::open(settings_.state_dir);
  processes_ = std::make_unique<state::Processes>(*db_);
  store_ = make_process_store(*processes_);
  // The rings of wake-ups below are closed by stop(), which ends the producers first.
  journal_ = std::make_unique<Journal>(*db_, [this] {
    if (streams_) streams_->notify();
  });
  streams_ = std::make_unique<Streams>(*journal_, [this] {
    std::vector<NodeReport> reports;
    Driver* const driver = live_driver_;
    if (driver == nullptr) return reports;
    const DriverView view = driver->view();
    reports.push_back(view.head);
    if (view.worker && view.worker->report) reports.push_back(*view.worker->report);
    return reports;
  });
  supervise::SupervisorOptions options;
  options.run_dir = settings_.run_dir;
  options.logs_dir = settings_.logs_dir;
  options.log_max_bytes = settings_.log_max_bytes;
  options.keep_generations = settings_.keep_generations;
  options.on_change = [this] {
    if (Driver* const driver = live_driver_) driver->wake();
    streams_->notify();
  };
  supervisor_ = std::make_unique<supervise::Supervisor>(std::move(options), *store_);
  node_ = std::make_unique<LocalNode>(
      settings_, file_, *supervisor_, *db_,
      [this] {
        if (Driver* const driver = live_driver_) driver->wake();
        streams_->notify();
      },
      [this](const std::string& line) { journal_->note("info", log::redact(line)); });
  supervisor_->adopt();
  if (settings_.role == "head") {
    driver_ = std::make_unique<Driver>(settings_, file_, *db_, *supervisor_, *node_, *journal_);
  } else {
    fence_ = std::make_unique<Fence>(*db_);
    sync_ = std::make_unique<SyncService>(settings_, file_);
    state::Meta meta(*db_);
    if (const auto stored = meta.get(kLimitsKey)) remember_limits(*stored);
  }
  AdminContext context{settings_,     file_,        *node_,      *journal_,         *streams_,
                       driver_.get(), fence_.get(), sync_.get(), db_->moved_aside()};
  context.on_rank_config = [this](const std::string& json) {
    remember_limits(json);
    state::Meta(*db_).set(kLimitsKey, json);
  };
  server_ = std::make_unique<AdminServer>(std::move(context));
  server_->listen();
}

void Agent::start() {
  server_->start();
  live_driver_ = driver_.get();
  if (driver_) driver_->start();
  const std::string tcp = port() != 0 ? cat(" and ", settings_.admin_listen->host, ":", port()) : std::string();
  journal_->note("info", cat("agent ", version(), " of ", settings_.name, " (", settings_.role, ") answers on ",
                             settings_.admin_socket, tcp));
}

void Agent::remember_limits(const std::string& rank_config_json) {
  try {
    const Config config = Config::from_json(parse_json(parse_rank_config(rank_config_json).config_json), "rank");
    const std::lock_guard lock(limits_mutex_);
    orphan_timeout_ = config.duration("ranks.orphan_timeout");
    stop_grace_ = config.duration("ranks.stop_grace");
  } catch (const Error& e) {
    log::warn(cat("limits of the head's configuration are not used: ", e.line()));
  }
}

void Agent::tend() {
  if (!fence_) return;
  milliseconds limit, grace;
  {
    const std::lock_guard lock(limits_mutex_);
    limit = orphan_timeout_;
    grace = stop_grace_;
  }
  const bool lost = fence_->silence() > limit;
  if (lost && !orphaned_ && node_->any_alive()) {
    journal_->note("error",
                   cat("the head has been silent for ", std::chrono::duration_cast<std::chrono::seconds>(limit).count(),
                       " s: stopping the ranks"));
    node_->stop_all(grace, true);
  }
  orphaned_ = lost && (orphaned_ || node_->any_alive());
}

void Agent::reload() noexcept {
  try {
    const Config fresh = file_.reload();
    log::init("agent", log::parse_level(fresh.text("log.level")));
    supervisor_->set_log_limits(static_cast<uint64_t>(fresh.integer("log.max_bytes")),
                                static_cast<int>(fresh.integer("log.keep_generations")));
    journal_->note("info", cat("read ", file_.path(), " again; status shows what differs from what runs"));
    if (driver_) driver_->wake();
  } catch (const std::exception& e) {
    log::error(cat("the configuration stays as it was: ", std::string_view(e.what())));
  }
}

void Agent::stop(bool stop_processes) {
  if (stop_processes && node_) {
    milliseconds grace;
    {
      const std::lock_guard lock(limits_mutex_);
      grace = stop_grace_;
    }
    if (driver_) {
      driver_->stop_everything(grace + kStopMargin);
    } else {
      node_->stop_all(grace, false);
      const auto deadline = std::chrono::steady_clock::now() + grace + kStopMargin;
      while (node_->any_alive() && std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(milliseconds(50));
    }
  }
  if (server_) server_->stop();
  if (streams_) streams_->stop();
  if (supervisor_) supervisor_->pause();
  if (node_) node_->pause();
  if (sync_) sync_->stop();
  live_driver_ = nullptr;
  server_.reset();
  sync_.reset();
  driver_.reset();
  fence_.reset();
  node_.reset();
  supervisor_.reset();
  streams_.reset();
  journal_.reset();
  db_.reset();
  run_lock_.reset();
  lock_.reset();
}

std::string Agent::status_line() {
  if (!driver_) return "worker";
  const DriverView view = driver_->view();
  return cat("cluster ", name(view.cluster.state), view.cluster.reason.empty() ? "" : ": ", view.cluster.reason);
}

}  // namespace glm53::agent
