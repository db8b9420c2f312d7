// The processes of one node.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/supervise/launcher.h"
#include "agent/supervise/notify_socket.h"
#include "common/process.h"
#include "common/rank_contract.h"

namespace glm53::supervise {

using Ms = std::chrono::milliseconds;

/// What is remembered of a process over the agent's own end.
struct ProcessRecord {
  std::string name;  ///< "rank0", "api"
  uint64_t generation = 0;
  ProcessId id;  ///< pid 0: could not be started
  std::string admin_socket, config_hash;
  Phase phase = Phase::exec;
  bool ready = false, stop_requested = false;
  int64_t started_at = 0;        ///< ms since the epoch
  int64_t ended_at = 0;          ///< 0: it runs
  std::optional<int> exit_code;  ///< of an ended one; empty with signal 0: nobody could collect it
  int exit_signal = 0;
  std::string last_error;  ///< X_GLM53_ERROR, or why it could not be started
};
/// Where records are kept. Called by the supervisor's thread and by callers of start() and stop(); exceptions are
/// logged.
class ProcessStore {
 public:
  virtual ~ProcessStore() = default;
  virtual void save(const ProcessRecord& record) = 0;
  /// Those that have not ended, and the newest of every name.
  virtual std::vector<ProcessRecord> current() = 0;
};

struct ProcessView : ProcessRecord {
  std::optional<std::pair<uint64_t, uint64_t>> progress;
  std::string status;
  Ms silent_for{0};    ///< since the last sign of life
  Ms extended_for{0};  ///< it asked for that much more time
  bool adopted = false;
};

struct StartSpec {
  std::string name;
  uint64_t generation = 0;
  std::vector<std::string> argv;
  std::map<std::string, std::string> env;  ///< NOTIFY_SOCKET is added
  std::string config;                      ///< JSON on descriptor 3
  std::string admin_socket, config_hash;
};

struct SupervisorOptions {
  std::string run_dir, logs_dir;
  uint64_t log_max_bytes = 64u << 20;
  int keep_generations = 5;
  /// Something worth a look happened (an end, a phase, ready). Any thread; must not block or call back.
  std::function<void()> on_change = [] {};
};

/// Thread-safe. Its destructor leaves the processes running.
class Supervisor {
 public:
  Supervisor(SupervisorOptions options, ProcessStore& store, std::unique_ptr<Launcher> launcher = make_fork_launcher());
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Takes over what earlier agents left running and removes the sockets of what is gone. Once, before anything is
  /// started.
  void adopt();
  /// Starts a process; if one of that name and generation exists (running or ended) nothing happens. A program that
  /// cannot be started is recorded as ended with the exit code of the error.
  void start(const StartSpec& spec);
  /// SIGTERM now, SIGKILL after `grace`. Does nothing when it is gone or was asked before with an earlier deadline.
  void stop(const std::string& name, uint64_t generation, Ms grace);
  /// Running ones and the newest of every name, by name and generation.
  std::vector<ProcessView> snapshot() const;
  /// A sign of life that came by another way than a notice: an answer on its admin socket. An adopted process that
  /// answers is ready.
  void touch(const std::string& name, uint64_t generation);
  /// Ends the thread: nothing is watched and on_change is not called any more. Processes are left alone.
  void pause();
  void set_log_limits(uint64_t max_bytes, int keep_generations);

 private:
  using Steady = std::chrono::steady_clock::time_point;
  struct Entry {
    ProcessView view;
    std::optional<NotifySocket> notices;
    UniqueFd pidfd;
    Steady heard{}, extended_until{};
    std::optional<Steady> kill_at;
    uint64_t log_bytes = 0;
  };
  using Key = std::pair<std::string, uint64_t>;

  void run();
  bool wait_for_events(int timeout_ms);
  void check(Entry& entry, Steady now, bool& changed);
  void receive(Entry& entry, Steady now, bool& changed);
  bool take_notice(Entry& entry, const Notice& notice, Steady now);
  void collect_end(Entry& entry, bool& changed);
  void mark_ended(Entry& entry, std::optional<int> code, int signal);
  void tend_log(Entry& entry, Steady now);
  void take_over(Entry entry);
  void forget_older(const std::string& name);
  void save(const Entry& entry) noexcept;
  std::string log_of(const Entry& entry) const;
  void wake() noexcept;

  SupervisorOptions options_;
  ProcessStore& store_;
  std::unique_ptr<Launcher> launcher_;
  mutable std::mutex mutex_;
  std::map<Key, Entry> entries_;  // guarded by mutex_
  Steady logs_tended_{};          // only the thread
  UniqueFd wake_fd_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace glm53::supervise
