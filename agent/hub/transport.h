// libcurl: requests one at a time, and several transfers at once, with our own time limits. One object a thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/hub/names.h"

namespace glm53::hub {

using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;

/// Bytes a second over all transfers of a download. Thread-safe.
class RateLimit {
 public:
  explicit RateLimit(int64_t bytes_per_second) : rate_(bytes_per_second) {}
  bool limited() const { return rate_ > 0; }
  /// Takes `n` bytes if the budget is not overdrawn.
  bool take(int64_t n);

 private:
  const int64_t rate_;
  std::mutex mutex_;
  double budget_ = 0;
  Clock::time_point last_ = Clock::now();
};

struct TransportOptions {
  Millis connect_timeout{10000}, first_byte_timeout{30000};
  Millis stall_window{30000};  ///< a transfer that gets less than stall_bytes within it is ended
  int64_t stall_bytes = int64_t{64} * 1024 * 30;
  std::string ca_file;  ///< "" = the system's
  const std::atomic<bool>* cancelled = nullptr;
};

/// Ended because its caller wanted so.
[[noreturn]] void throw_cancelled();

/// Head of an answer.
struct Head {
  int status = 0;
  std::vector<std::pair<std::string, std::string>> headers;
  /// First header of that name, whatever its case; "" when absent.
  std::string_view header(std::string_view name) const;
};

struct Request {
  std::string method = "GET";
  Url url = {};
  std::string token = {};                                 ///< sent as bearer token; "" = none
  std::optional<std::pair<int64_t, int64_t>> range = {};  ///< first and last byte
  std::string if_range = {};                              ///< an etag; "" = none
  std::vector<std::string> headers = {};                  ///< more of them, "Name: value"
};
struct Response {
  Head head;
  std::string body;
};

/// A transfer in flight. Callbacks may throw; the exception ends this transfer only.
struct Transfer {
  Request request;
  std::function<void(const Head&)> on_head;  ///< before the first byte of the body, also when there is none
  std::function<void(std::string_view)> on_body;
  RateLimit* limit = nullptr;
  // What came of it:
  Head head;
  std::exception_ptr failed;  ///< empty: the whole answer arrived
};

class Transport {
 public:
  explicit Transport(TransportOptions options);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  /// One request; redirects are not followed. Throws Error(unavailable) when no answer came, Error(corrupt) when the
  /// body is larger than `max_body`.
  Response request(const Request& request, size_t max_body);

  /// Starts a transfer; it stays at its address until wait() hands it out or clear() drops it.
  void start(std::shared_ptr<Transfer> transfer);
  /// The next one that ended, or nullptr after `wait`.
  std::shared_ptr<Transfer> wait(Millis wait);
  size_t active() const;
  /// Ends all transfers.
  void clear();
  bool cancelled() const { return options_.cancelled != nullptr && options_.cancelled->load(); }

 private:
  struct Impl;
  TransportOptions options_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace glm53::hub
