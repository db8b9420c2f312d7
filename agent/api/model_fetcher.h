// Brings the models that a cluster names into this node's hub cache, on a thread of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "agent/api/hub_models.h"
#include "agent/reconcile/reconcile.h"
#include "common/config.h"
#include "common/error.h"

namespace glm53::hub {
class Downloader;
}

namespace glm53::agent {

/// How far it is. `request` says for whom.
struct FetchReport {
  std::string request;  ///< empty: nothing was asked for
  reconcile::Weights state = reconcile::Weights::none;
  std::string model;  ///< "org/name", while it is on its way
  int64_t bytes_done = 0, bytes_total = 0, rate = 0, eta_s = -1;
  std::string error_code, error, remedy;  ///< of a failed one
};

/// One at a time. Thread-safe but for the destructor.
class ModelFetcher {
 public:
  /// `on_change`: the state became another one; `on_event`: a line for the journal. Both from the fetcher's thread.
  ModelFetcher(std::function<void()> on_change, std::function<void(const std::string&)> on_event);
  ~ModelFetcher() { stop(); }
  ModelFetcher(const ModelFetcher&) = delete;
  ModelFetcher& operator=(const ModelFetcher&) = delete;

  /// Idempotent for one `request`. `own`: this node's file, for the keys of its hub. Throws Error(busy) while another
  /// request is being ended.
  void start(const std::string& request, std::vector<HubModel> models, const Config& own, const std::string& cache);
  /// Ends what is on its way; what arrived is kept.
  void cancel();
  /// The same, and waits for it.
  void stop();
  FetchReport report() const;

 private:
  void run(const std::string& request, const std::vector<HubModel>& models, const Config& own,
           const std::string& cache);
  void fetch(const HubModel& model, const Config& own, const std::string& cache);
  void finish(reconcile::Weights state, const Error* error);

  const std::function<void()> on_change_;
  const std::function<void(const std::string&)> on_event_;
  mutable std::mutex mutex_;  // guards the next four
  FetchReport report_;
  std::shared_ptr<hub::Downloader> downloader_;  ///< at work
  bool running_ = false, cancelled_ = false;
  std::thread thread_;
};

}  // namespace glm53::agent
