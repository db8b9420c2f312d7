// What bringing models somewhere has in common: one order at a time on a thread of its own, that can be called off and
// says how far it is.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "agent/reconcile/reconcile.h"
#include "common/error.h"

namespace glm53::agent {

/// How far it is. `request` says for whom.
struct FetchReport {
  std::string request;  ///< empty: nothing was asked for
  reconcile::Weights state = reconcile::Weights::none;
  std::string model;  ///< "org/name", while it is on its way
  int64_t bytes_done = 0, bytes_total = 0, rate = 0, eta_s = -1;
  std::string error_code, error, remedy;  ///< of a failed one
};

/// Thread-safe but for the destructor.
class ModelJob {
 public:
  /// `what`: "download", "copy". `on_change`: the state became another one; from the job's thread.
  ModelJob(std::string what, std::function<void()> on_change)
      : what_(std::move(what)), on_change_(std::move(on_change)) {}
  ~ModelJob() { stop(); }
  ModelJob(const ModelJob&) = delete;
  ModelJob& operator=(const ModelJob&) = delete;

  /// Runs `work`; idempotent for one `request`. Throws Error(busy) while another one is being ended.
  void start(const std::string& request, std::function<void()> work);
  /// Ends what is on its way; what arrived is kept.
  void cancel();
  /// The same, and waits for it.
  void stop();
  FetchReport report() const;

  /// For the work: the next model and how to call it off. Throws Error(cancelled) when that has happened.
  void begin(const std::string& model, std::function<void()> call_off);
  void progress(int64_t bytes_done, int64_t bytes_total, int64_t rate, int64_t eta_s);

 private:
  void run(const std::function<void()>& work);
  void finish(reconcile::Weights state, const Error* error);

  const std::string what_;
  const std::function<void()> on_change_;
  mutable std::mutex mutex_;  // guards the next four
  FetchReport report_;
  std::function<void()> call_off_;  ///< of what is at work
  bool running_ = false, cancelled_ = false;
  std::thread thread_;
};

}  // namespace glm53::agent
