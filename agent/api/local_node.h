// The agent's own node: runs commands on it and reports about it. A worker's agent is this plus REST; the head's driver
// uses one directly.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "agent/api/config_file.h"
#include "agent/api/model_fetcher.h"
#include "agent/api/report.h"
#include "agent/api/settings.h"
#include "agent/state/history.h"
#include "agent/state/wanted.h"
#include "agent/supervise/supervisor.h"

namespace glm53::agent {

/// One action for a node, as POST /node/actions carries it.
struct NodeCommand {
  uint64_t epoch = 0;
  reconcile::ActionKind kind = reconcile::ActionKind::none;
  int rank = -1;
  uint64_t generation = 0;
  std::string config;       ///< start_rank: RankConfig; start_api: ApiConfig; download: HubModels (JSON)
  std::string request;      ///< download
  std::string config_hash;  ///< start_api
  std::chrono::milliseconds grace{20000};
};
std::string to_json(const NodeCommand& command);
/// Throws Error(usage) naming the member.
NodeCommand parse_command(std::string_view json);

/// supervise::ProcessStore over the database.
std::unique_ptr<supervise::ProcessStore> make_process_store(state::Processes& processes);

class LocalNode {
 public:
  /// `on_change`: a download ended; `note`: its lines. Both from its thread.
  LocalNode(const AgentSettings& settings, const ConfigFile& file, supervise::Supervisor& supervisor,
            state::Database& db, std::function<void()> on_change, std::function<void(const std::string&)> note);
  /// Idempotent; never waits for a process. Throws Error.
  void run(const NodeCommand& command);
  NodeReport report();
  /// Ends a download and calls back no more.
  void pause() { fetcher_.stop(); }
  /// Asks every process to stop.
  void stop_all(std::chrono::milliseconds grace, bool only_ranks);
  bool any_alive();
  uint64_t next_api_number() { return processes_.last_generation("api") + 1; }
  std::string socket_of(std::string_view process) const;

 private:
  void start_rank(const NodeCommand& command);
  void start_api(const NodeCommand& command);

  const AgentSettings& settings_;
  const ConfigFile& file_;
  supervise::Supervisor& supervisor_;
  state::Processes processes_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  ModelFetcher fetcher_;
};

}  // namespace glm53::agent
