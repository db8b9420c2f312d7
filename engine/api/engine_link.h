// The API process's side of the wire to rank 0.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/file.h"
#include "engine/api/journal.h"
#include "engine/runtime/wire.h"

namespace glm53::api {

struct EngineStatus {
  bool connected = false;      ///< a rank has said Hello and its connection stands
  bool was_connected = false;  ///< ever
  bool gate_open = false, draining = false;
  uint64_t generation = 0;       ///< of the last rank
  wire::Hello hello;             ///< of the last rank
  wire::Stats stats;             ///< the last ones
  uint64_t progress_age_ms = 0;  ///< since the rank's step loop turned, as far as is known
  size_t unfinished = 0, waiting = 0;
};

/// Listens for rank 0, one connection at a time (a newer generation replaces an older one), keeps the journal, and
/// replays it. Requests sent to a lost rank are held and sent again when the next one serves the same model and its
/// gate is open. Thread-safe.
class EngineLink {
 public:
  struct Limits {
    size_t max_queue = 1024;
    int64_t max_queue_tokens = 4'000'000;
  };
  /// Throws Error(busy) when the socket is in use.
  EngineLink(const std::string& socket, Limits limits);
  ~EngineLink();  ///< stops
  EngineLink(const EngineLink&) = delete;
  EngineLink& operator=(const EngineLink&) = delete;

  /// Ids for requests, consecutive; the first one is returned.
  uint64_t reserve(size_t count);
  /// Takes requests all together or not at all. Throws ApiError: 503 while gated, draining or before a rank was ready,
  /// 429 when the queue is full.
  void submit(std::vector<wire::Submit> requests, const std::shared_ptr<RequestSink>& sink);
  /// Forgets a request and tells the rank.
  void cancel(uint64_t id, std::optional<uint32_t> keep_tokens = std::nullopt);

  /// Open: requests are admitted. Closed (at first): only canaries. Opening ends draining.
  void set_gate(bool open);
  void drain();
  EngineStatus status() const;
  /// Ends the connection and the thread; unfinished requests fail with 503.
  void stop();

 private:
  class Connection;
  using Clock = std::chrono::steady_clock;

  void run();
  void accept_one();
  void greet();
  bool receive();
  void handle(const wire::Delta& delta);
  void handle(const wire::Stats& stats);
  void drop(std::string_view why);
  void send_unsent();
  void count_end();
  uint32_t retry_after_s() const;

  const Limits limits_;
  const std::string path_;
  UniqueFd listener_, wake_;
  std::shared_ptr<Connection> candidate_;  ///< link thread only: connected, no Hello yet
  Clock::time_point candidate_until_{};

  mutable std::mutex mutex_;  ///< guards everything below
  Journal journal_;
  std::shared_ptr<Connection> connection_;  ///< replaced by the link thread only
  EngineStatus status_;
  Clock::time_point stats_at_{};
  uint64_t next_id_ = 1;
  std::optional<Clock::time_point> ended_at_;  ///< of the last request, while others are unfinished
  double ends_every_ms_ = 0;                   ///< mean over the last ones; 0 = not known
  bool stopping_ = false;

  std::thread thread_;  ///< last: starts when everything else stands
};

}  // namespace glm53::api
