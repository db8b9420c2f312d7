// Brings the models that a cluster names into this node's hub cache, on a thread of its own.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "agent/api/hub_models.h"
#include "agent/api/model_job.h"
#include "common/config.h"

namespace glm53::agent {

/// One at a time. Thread-safe but for the destructor.
class ModelFetcher {
 public:
  /// `on_change`: the state became another one; `on_event`: a line for the journal. Both from the fetcher's thread.
  ModelFetcher(std::function<void()> on_change, std::function<void(const std::string&)> on_event)
      : on_event_(std::move(on_event)), job_("download", std::move(on_change)) {}

  /// Idempotent for one `request`. `own`: this node's file, for the keys of its hub. Throws Error(busy) while another
  /// request is being ended.
  void start(const std::string& request, std::vector<HubModel> models, const Config& own, const std::string& cache);
  void cancel() { job_.cancel(); }
  void stop() { job_.stop(); }
  FetchReport report() const { return job_.report(); }

 private:
  void fetch(const HubModel& model, const Config& own, const std::string& cache);

  const std::function<void(const std::string&)> on_event_;
  ModelJob job_;  // last: its thread uses the rest
};

}  // namespace glm53::agent
