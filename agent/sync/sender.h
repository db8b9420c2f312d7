// The sending side of a copy: several streams, each a connection of its own, until the receiver has everything.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "agent/sync/receiver.h"

namespace glm53::sync {

/// A connection to a receiver. Errors as Receiver throws them; Error(unavailable), Error(peer_lost) or Error(stalled)
/// when it cannot be reached.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual Have open(const Manifest& manifest) = 0;  ///< waits while the receiver verifies what it has
  virtual void send(const std::string& etag, int64_t offset, std::string_view data, uint64_t checksum) = 0;
  virtual void commit(const std::string& digest) = 0;
};

struct SenderSettings {
  std::string cache, journal_dir;
  int streams = 6;
  int64_t limit_rate = 0;                            ///< bytes a second; 0 = none
  std::chrono::milliseconds give_up_after{300'000};  ///< without any progress
  std::chrono::milliseconds pause{500};              ///< before the second attempt; doubled up to 10 s
};

struct SendProgress {
  int64_t bytes_done = 0, bytes_total = 0, bytes_sent = 0;
};
struct SendResult {
  std::string digest;  ///< of the manifest that the receiver now has
  int64_t bytes = 0, bytes_sent = 0;
};

class Sender {
 public:
  using Connect = std::function<std::unique_ptr<Peer>()>;  ///< called by several threads
  Sender(SenderSettings settings, Connect connect) : settings_(std::move(settings)), connect_(std::move(connect)) {}
  /// Verifies what it sends unless that was done before; a damaged source is never copied. Reconnects and goes on
  /// where the receiver says. Throws Error(corrupt) for a damaged source or a receiver whose disk damages data,
  /// Error(cancelled), Error(unavailable) E643 when the receiver is away for too long, E640 when its disk is full.
  SendResult run(const Manifest& manifest, const std::function<void(const SendProgress&)>& on_progress,
                 const std::function<void(const std::string&)>& on_event);
  /// Any thread: run() ends soon.
  void cancel() { cancelled_ = true; }

 private:
  struct Round;
  const SenderSettings settings_;
  const Connect connect_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace glm53::sync
