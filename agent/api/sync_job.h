// Copies models from the head's cache to the worker's, on a thread of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/api/hub_models.h"
#include "agent/api/model_job.h"
#include "agent/api/settings.h"
#include "agent/sync/sender.h"

namespace glm53::agent {

/// The worker's admin API as a receiver.
std::unique_ptr<sync::Peer> worker_peer(const WorkerAddress& worker, uint64_t epoch);

/// One at a time. Thread-safe but for the destructor.
class SyncJob {
 public:
  SyncJob(std::function<void()> on_change, std::function<void(const std::string&)> on_event)
      : on_event_(std::move(on_event)), job_("copy", std::move(on_change)) {}

  struct Order {
    std::string request;  ///< for whom; start() is idempotent for one
    std::vector<HubModel> models;
    WorkerAddress worker;
    uint64_t epoch = 0;
    std::string cache, journal_dir;
    int streams = 6;
    int64_t limit_rate = 0;
  };
  /// Throws Error(busy) while another one is at work.
  void start(Order order);
  void cancel() { job_.cancel(); }
  void stop() { job_.stop(); }
  FetchReport report() const { return job_.report(); }

 private:
  void copy(const Order& order, const HubModel& model);

  const std::function<void(const std::string&)> on_event_;
  ModelJob job_;  // last: its thread uses the rest
};

}  // namespace glm53::agent
