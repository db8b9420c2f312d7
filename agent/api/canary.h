// The canary: one greedy request through the API process that passes the closed gate, before anybody else's may.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <nlohmann/json_fwd.hpp>

#include "agent/reconcile/reconcile.h"

namespace glm53::agent {

/// nullopt-like: empty when the answer is good. A text of '!' alone is what broken numerics look like (token 0 over and
/// over).
std::string judge_canary(const std::string& answer_json);

/// What an answer of an admin socket without "ok":true says; never raw JSON.
std::string refusal_text(const nlohmann::ordered_json& answer);

/// One at a time, on its own thread; belongs to a generation. Thread-safe.
class CanaryRunner {
 public:
  explicit CanaryRunner(std::function<void()> on_done) : on_done_(std::move(on_done)) {}
  ~CanaryRunner() { cancel(); }
  CanaryRunner(const CanaryRunner&) = delete;
  CanaryRunner& operator=(const CanaryRunner&) = delete;
  void start(uint64_t generation, const std::string& socket);
  /// State for that generation; none if another one was tested.
  reconcile::Canary state(uint64_t generation) const;
  std::string error() const;
  /// Ends what runs and forgets it.
  void cancel();

 private:
  void run(const std::string& socket);
  std::function<void()> on_done_;
  mutable std::mutex mutex_;
  uint64_t generation_ = 0;  // guarded by mutex_, as are the next two
  reconcile::Canary state_ = reconcile::Canary::none;
  std::string error_;
  std::atomic<bool> cancelled_{false};
  std::thread thread_;  // only the owner's thread
};

}  // namespace glm53::agent
