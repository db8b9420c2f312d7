// The head's connection to the worker's agent: a thread that asks for its report and hands it commands.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "agent/api/local_node.h"
#include "agent/api/report.h"
#include "agent/trust/renewal.h"

namespace glm53::agent {

/// The worker as last seen.
struct WorkerView {
  std::optional<NodeReport> report;  ///< the last one; kept while the worker is silent
  std::chrono::milliseconds age{0};  ///< of the report
  bool reachable = false;            ///< answered within the last 10 s
  std::string error;                 ///< why not
  reconcile::Time taken_at{};        ///< when the report arrived
};

/// One command at a time, in order with the reports: a report taken after a command shows its effect. Thread-safe.
class WorkerLink {
 public:
  struct Result {
    std::string error;  ///< empty: done
  };
  /// `on_change` is called on the link's thread when a report differs in kind or a command is done; it must not block.
  /// Over TLS it also renews the worker's certificate in time.
  WorkerLink(WorkerAddress address, uint64_t epoch, std::shared_ptr<trust::Trust> trust,
             std::function<void()> on_change);
  ~WorkerLink();
  WorkerLink(const WorkerLink&) = delete;
  WorkerLink& operator=(const WorkerLink&) = delete;

  WorkerView view() const;
  bool busy() const;
  /// Throws Error(busy) while one is under way.
  void submit(const NodeCommand& command);
  /// Result of the last command, once.
  std::optional<Result> take_result();
  /// Asks often (every 500 ms) while something happens or ranks run, else every 3 s.
  void set_lively(bool lively);
  /// The next call makes a new connection: the worker's certificate is judged again.
  void reconnect();
  const WorkerAddress& address() const { return address_; }

 private:
  void run();
  void observe(class HttpClientHolder& client);
  void execute(class HttpClientHolder& client, const NodeCommand& command);
  void renew(class HttpClientHolder& client);

  const WorkerAddress address_;
  const uint64_t epoch_;
  const std::function<void()> on_change_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::optional<NodeReport> report_;
  std::chrono::steady_clock::time_point reported_{};
  reconcile::Time taken_at_{};
  bool contact_lost_ = true;
  std::string error_;
  std::optional<NodeCommand> command_;
  std::optional<Result> result_;
  bool lively_ = true, stopping_ = false, reconnect_ = false;
  trust::Renewal renewal_;  // of thread_
  std::thread thread_;
};

}  // namespace glm53::agent
