// The head's main loop: observe -> next_actions -> run -> record. It decides nothing; agent/reconcile does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "agent/api/canary.h"
#include "agent/api/config_file.h"
#include "agent/api/journal.h"
#include "agent/api/local_node.h"
#include "agent/api/preflight_runner.h"
#include "agent/api/probe.h"
#include "agent/api/sync_job.h"
#include "agent/api/worker_link.h"
#include "agent/reconcile/reconcile.h"
#include "agent/state/operations.h"
#include "agent/state/wanted.h"
#include "common/error.h"

namespace glm53::agent {

/// A change of the wanted state, as PUT /wanted brings it.
struct Wish {
  bool running = false, restart = false, preempt = false;
  std::optional<std::map<std::string, std::string>> settings;
  int64_t drain_ms = 30000;
  std::string requested_by;
};
struct WishAnswer {
  std::string operation;  ///< empty: unchanged
  bool attached = false;
};

/// A copy of everything status shows.
struct DriverView {
  reconcile::ClusterView cluster;
  int64_t state_since = 0;
  state::WantedRow wanted;
  std::optional<state::GenerationRow> generation;  ///< the last one
  int64_t restarts = 0;                            ///< automatic ones since the wanted state was set
  std::string operation;                           ///< the one at work
  bool gate_open = false;
  std::string stuck;  ///< why the last look at the cluster came to no action: a full disk, for example
  NodeReport head;
  std::optional<WorkerView> worker;
  std::string worker_address;
  Counters counters;
  Config config;  ///< effective
  std::string config_json, config_hash;
};

class Driver {
 public:
  /// Takes the lease and its epoch. Nothing moves before start().
  Driver(const AgentSettings& settings, ConfigFile& file, state::Database& db, supervise::Supervisor& supervisor,
         LocalNode& node, Journal& journal);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void start();
  /// Look again soon. Any thread, never blocks.
  void wake();
  /// Throws Error(busy) naming the operation at work, Error(config), Error(usage).
  WishAnswer want(const Wish& wish);
  /// Copies models to the worker, whatever is wanted; an operation of its own. Throws as want() does.
  std::string copy_to_worker(std::vector<HubModel> models, const std::string& requested_by);
  DriverView view();
  state::Operations& operations() { return operations_; }
  uint64_t epoch() const { return epoch_; }
  std::optional<WorkerAddress> worker() const;
  /// Members of the cluster changed: the worker has to show its certificate again.
  void reconnect_worker();
  /// Stops everything without changing what is wanted (the agent ends). False when something was left after `limit`.
  bool stop_everything(std::chrono::milliseconds limit);

 private:
  using Action = reconcile::NodeAction;
  struct Step {
    std::string operation;
    int64_t seq = 0;
    Action action;
  };

  void run();
  bool tick();
  void load_wanted();
  void reload_history();
  reconcile::Wanted wanted_now() const;
  std::string fetch_request() const;
  reconcile::Observed observe(reconcile::Time now);
  void forget_failed_fetch(reconcile::Observed& observed);
  void note_changes(const reconcile::Wanted& wanted, const reconcile::Observed& observed, reconcile::Time now);
  void finish_operation(const reconcile::Observed& observed);
  bool finish_without_models();
  void finish_copy();
  void finish(const std::string& state, const std::optional<Error>& error);

  bool execute(const Action& action, reconcile::Time now);
  bool execute_here(const Action& action);
  bool execute_there(const Action& action);
  bool start_copy(const Action& action);
  void prepare(const Action& action);
  void close_generation(const Action& action);
  void open_gate();
  void begin_copy(const std::string& request, std::vector<HubModel> models);
  void note_copy();
  void begin_preflight(const Step& step);
  void note_preflight();
  void drain();
  void run_in_background(const Action& action, std::function<void()> body);
  void collect_results();
  NodeCommand command_for(const Action& action);
  Step begin(const Action& action);
  void end(const Step& step, const std::string& error);

  WishAnswer want_running(const Wish& wish);
  WishAnswer want_stopped(const Wish& wish);
  void adopt_config(const Wish& wish);
  void clear_way(const Wish& wish, const state::OperationRow& at_work);
  std::string new_operation(const std::string& kind, const Wish& wish);
  bool reached_up() const;

  const AgentSettings& settings_;
  ConfigFile& file_;
  supervise::Supervisor& supervisor_;
  LocalNode& node_;
  Journal& journal_;
  state::WantedStore wanted_store_;
  state::Operations operations_;
  state::Generations generations_;
  state::Processes processes_;
  state::Lease lease_;
  uint64_t epoch_ = 0;
  Probe probe_;
  CanaryRunner canary_;
  PreflightRunner preflight_;
  SyncJob copy_;

  mutable std::mutex mutex_;  // guards all below but wake_
  std::string stuck_;
  std::unique_ptr<WorkerLink> link_;
  state::WantedRow wanted_;
  Effective effective_;
  std::vector<state::GenerationRow> history_;
  std::string operation_, operation_kind_;
  state::TimeMs operation_since_ = 0;
  reconcile::ClusterView cluster_;
  state::TimeMs state_since_ = 0;
  NodeReport head_report_;
  uint64_t gate_generation_ = 0, gate_api_ = 0;
  std::optional<reconcile::Time> drain_since_;
  uint64_t drain_generation_ = 0;
  std::map<std::string, std::chrono::steady_clock::time_point> retry_after_;  ///< by node
  std::optional<Step> worker_step_, preflight_step_, copy_step_;
  state::TimeMs checked_at_ = 0;  ///< when the last preflight ended
  state::TimeMs fetch_failed_at_ = 0;
  std::optional<reconcile::Time> announced_backoff_;
  state::TimeMs renewed_ = 0;
  bool exiting_ = false;

  std::thread background_;  // gate and drain calls
  std::atomic<bool> background_busy_{false};
  std::optional<Step> background_step_;
  std::string background_error_;                         // written by background_, read after background_busy_ is false
  std::optional<std::pair<uint64_t, uint64_t>> opened_;  // likewise

  std::mutex wake_mutex_;
  std::condition_variable wake_cv_;
  bool woken_ = false, stopping_ = false;  // guarded by wake_mutex_
  std::thread thread_;
};

/// Kind of error behind a rank's exit code.
Code code_of_exit(int exit_code);

}  // namespace glm53::agent
