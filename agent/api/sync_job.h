// Copies models from the head's cache to the worker's, on a thread of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "agent/api/hub_models.h"
#include "agent/api/model_fetcher.h"
#include "agent/api/settings.h"
#include "agent/sync/sender.h"

namespace glm53::agent {

/// The worker's admin API as a receiver.
std::unique_ptr<sync::Peer> worker_peer(const WorkerAddress& worker, uint64_t epoch);

/// One at a time. Thread-safe but for the destructor.
class SyncJob {
 public:
  SyncJob(std::function<void()> on_change, std::function<void(const std::string&)> on_event)
      : on_change_(std::move(on_change)), on_event_(std::move(on_event)) {}
  ~SyncJob() { stop(); }
  SyncJob(const SyncJob&) = delete;
  SyncJob& operator=(const SyncJob&) = delete;

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
  void cancel();
  void stop();
  FetchReport report() const;

 private:
  void run(const Order& order);
  void copy(const Order& order, const HubModel& model);
  void finish(reconcile::Weights state, const Error* error);

  const std::function<void()> on_change_;
  const std::function<void(const std::string&)> on_event_;
  mutable std::mutex mutex_;  // guards the next four
  FetchReport report_;
  std::shared_ptr<sync::Sender> sender_;
  bool running_ = false, cancelled_ = false;
  std::thread thread_;
};

}  // namespace glm53::agent
