// A worker's memory of who may command it.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include "agent/state/wanted.h"

namespace glm53::agent {

/// Epochs only grow: a head that was away and wakes up cannot command against its successor. Thread-safe.
class Fence {
 public:
  explicit Fence(state::Database& db);
  /// Throws Error(busy) when `epoch` is older than one seen; remembers a newer one (durably, before it returns).
  void admit(uint64_t epoch);
  /// Contact by the head with that epoch; an older one does not count. True if it counted.
  bool contact(uint64_t epoch);
  /// Since the last contact, or since this agent's start.
  std::chrono::milliseconds silence() const;
  uint64_t newest() const;

 private:
  state::Meta meta_;
  mutable std::mutex mutex_;
  uint64_t newest_ = 0;                                                            // guarded by mutex_
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();  // guarded by mutex_
};

}  // namespace glm53::agent
