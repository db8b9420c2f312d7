// Rank 0's connection to the API process: connects, says hello, reads, writes, and connects again when it breaks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>

#include "common/file.h"
#include "engine/runtime/wire.h"

namespace glm53 {

/// What comes from the API process. Connections are numbered; an answer is sent only on the connection that its request
/// came from.
struct ApiConnected {
  uint64_t connection = 0;
};
struct ApiLost {
  uint64_t connection = 0;
};
struct ApiMessage {
  uint64_t connection = 0;
  wire::Message message;
};
using ApiEvent = std::variant<ApiConnected, ApiLost, ApiMessage>;

/// Two threads. `on_event` runs on the reading one and must not throw.
class ApiLink {
 public:
  ApiLink(std::string socket, wire::Hello hello, std::function<void(ApiEvent)> on_event);
  ~ApiLink();
  ApiLink(const ApiLink&) = delete;
  ApiLink& operator=(const ApiLink&) = delete;
  /// Queues a message; it is dropped when `connection` is not the current one. An API process that does not read is
  /// disconnected.
  void send(uint64_t connection, wire::Message message);
  /// Waits until everything queued is written, or the time is over.
  void flush(std::chrono::milliseconds limit);

 private:
  void read_loop();
  void serve_connection(const std::shared_ptr<UniqueFd>& fd);
  void write_loop();
  void drop(const std::shared_ptr<UniqueFd>& fd);

  const std::string socket_;
  const wire::Hello hello_;
  const std::function<void(ApiEvent)> on_event_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // guarded by mutex_
  bool stop_ = false, writing_ = false;
  std::shared_ptr<UniqueFd> fd_;  // null: not connected
  uint64_t connection_ = 0;
  std::deque<wire::Message> queue_;
  std::thread reader_, writer_;  // last: they use all of the above
};

}  // namespace glm53
