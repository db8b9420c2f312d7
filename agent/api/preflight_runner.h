// The first action of a start: the checks of all nodes, on a thread of their own.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "agent/preflight/check.h"
#include "agent/reconcile/reconcile.h"

namespace glm53::agent {

/// One at a time; belongs to a change of the wanted state. Thread-safe but for start() and the destructor.
class PreflightRunner {
 public:
  using Run = std::function<std::vector<preflight::NodeResult>()>;
  explicit PreflightRunner(std::function<void()> on_done) : on_done_(std::move(on_done)) {}
  ~PreflightRunner() { wait(); }
  PreflightRunner(const PreflightRunner&) = delete;
  PreflightRunner& operator=(const PreflightRunner&) = delete;
  /// `key`: when the wanted state changed. Waits for an earlier run.
  void start(int64_t key, Run run);
  /// State for that key; none if another one was checked, or when a node could not be asked (checked again when it
  /// answers).
  reconcile::Preflight state(int64_t key) const;
  /// Lines of failed checks, or of warnings.
  std::vector<std::string> failures() const;
  std::vector<std::string> warnings() const;
  /// Waits for the end of what runs.
  void wait();
  /// Forgets a failure, so that the nodes are checked again.
  void forget_failure();

 private:
  void work(const Run& run);
  std::function<void()> on_done_;
  mutable std::mutex mutex_;
  int64_t key_ = -1;  // guarded by mutex_, as are the next three
  reconcile::Preflight state_ = reconcile::Preflight::none;
  std::vector<std::string> failures_, warnings_;
  std::thread thread_;
};

}  // namespace glm53::agent
