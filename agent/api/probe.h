// Counters of the API process and of rank 0, read from their admin sockets.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "agent/supervise/supervisor.h"

namespace glm53::agent {

/// Of rank 0 (docs/rank-contract.md, wire Stats).
struct Pools {
  int64_t blocks_used = 0, blocks_total = 0, blocks_cached = 0, slots_used = 0, slots_total = 0;
  int64_t snapshots_used = 0, snapshots_total = 0, prefix_queries = 0, prefix_hits = 0, preemptions = 0;
};

struct Counters {
  bool rank0_answers = false, api_answers = false;
  int64_t running = 0, waiting = 0;
  int64_t api_in_flight = 0, api_connections = 0;
  int64_t tokens_total = 0;      ///< generated since this agent started to look
  double tokens_per_second = 0;  ///< over the last ten seconds
  Pools pools;                   ///< zeros while rank 0 does not answer
  std::string model_digest;      ///< of the model that serves; empty without one
  uint64_t api_generation = 0;   ///< generation of ranks the API process is connected to; 0 none
};

/// Polls every second while something is ready. An answer of the API process counts as its sign of life. Thread-safe.
class Probe {
 public:
  Probe(std::string run_dir, supervise::Supervisor& supervisor);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;
  Counters counters() const;
  /// Polls every 100 ms while requests are waited for.
  void set_hurry(bool hurry);

 private:
  void run();
  void poll();
  void count_tokens(uint64_t generation, int64_t generated);

  const std::string run_dir_;
  supervise::Supervisor& supervisor_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Counters counters_;  // guarded by mutex_, as are the next three
  bool hurry_ = false, stopping_ = false;
  // Only the thread.
  uint64_t rank_generation_ = 0;
  int64_t rank_tokens_ = 0, tokens_total_ = 0;
  std::deque<std::pair<std::chrono::steady_clock::time_point, int64_t>> samples_;
  std::thread thread_;
};

}  // namespace glm53::agent
