// An agent, head or worker, put together.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "agent/api/admin_server.h"
#include "agent/state/database.h"

namespace glm53::agent {

class Agent {
 public:
  /// Reads the configuration. Throws Error(config).
  explicit Agent(const std::string& config_path);
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  const AgentSettings& settings() const { return settings_; }
  /// Takes the state folder and the run folder. Throws Error(busy) naming who holds it.
  void lock();
  /// Opens the database and binds the admin addresses. Throws Error(busy) when one is in use.
  void open();
  /// Adopts what runs, answers requests, starts to act.
  void start();
  /// About once a second, from the main thread: a worker without a head stops its ranks.
  void tend();
  /// SIGHUP: reads the file again; what runs is left alone, log settings apply. Never throws.
  void reload() noexcept;
  /// Ends the agent. Processes stay, to be adopted next time, unless told otherwise.
  void stop(bool stop_processes);
  /// One line for systemd's status.
  std::string status_line();
  /// Of the admin API: "GET /admin/v1/status" and so on.
  std::vector<std::string> routes() const { return server_ ? server_->routes() : std::vector<std::string>(); }
  uint16_t port() const { return server_ ? server_->port() : 0; }

 private:
  void remember_limits(const std::string& rank_config_json);

  ConfigFile file_;
  AgentSettings settings_;
  std::unique_ptr<state::DirectoryLock> lock_, run_lock_;
  std::unique_ptr<state::Database> db_;
  std::unique_ptr<state::Processes> processes_;
  std::unique_ptr<supervise::ProcessStore> store_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<Streams> streams_;
  std::unique_ptr<supervise::Supervisor> supervisor_;
  std::unique_ptr<LocalNode> node_;
  std::unique_ptr<Fence> fence_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<SyncService> sync_;  ///< a worker's
  std::unique_ptr<AdminServer> server_;
  std::mutex limits_mutex_;
  std::chrono::milliseconds orphan_timeout_{60'000}, stop_grace_{20'000};  // guarded by limits_mutex_
  bool orphaned_ = false;
  /// driver_ for the threads that call back, from start() to stop().
  std::atomic<Driver*> live_driver_{nullptr};
};

}  // namespace glm53::agent
