// Every HTTP client of the project (cpp-httplib behind it): ctl, agent to agent, health probes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/tls.h"

namespace glm53 {

struct HttpAnswer {
  int status = 0;
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

/// One endpoint; keeps its connection. Not thread-safe: one object a thread.
class HttpClient {
 public:
  /// "http://127.0.0.1:8888", "unix:/run/glm53/agent.sock", or "https://10.0.0.1:8890" with what `tls` shows and
  /// trusts.
  explicit HttpClient(const std::string& endpoint, const std::string& bearer_token = {},
                      std::shared_ptr<const TlsClient> tls = nullptr);
  ~HttpClient();
  HttpClient(HttpClient&&) noexcept;
  void set_timeout(std::chrono::milliseconds connect, std::chrono::milliseconds read);
  /// Throws Error(unavailable) when nobody answers (naming the endpoint), Error(stalled) at the time limit,
  /// Error(denied) for a server that `tls` does not trust.
  HttpAnswer request(std::string_view method, std::string_view path, std::string_view body = {},
                     std::string_view content_type = "application/json");
  /// Streams the body: `chunk` returns false to stop. Throws Error(peer_lost) when the answer ends early. The body of
  /// an answer outside 200...299 is no stream: it is returned in `body` (at most 1 MiB of it).
  HttpAnswer stream(std::string_view method, std::string_view path, std::string_view body,
                    const std::function<bool(std::string_view)>& chunk);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Splits a server-sent-event stream: feed() calls `event(name, data)` for each complete event ("message" where it has
/// no name). Throws Error(corrupt) for an event over 64 MiB.
class SseParser {
 public:
  explicit SseParser(std::function<void(std::string_view name, std::string_view data)> event)
      : event_(std::move(event)) {}
  void feed(std::string_view bytes);

 private:
  void line(std::string_view text);

  std::function<void(std::string_view, std::string_view)> event_;
  std::string buffer_;  ///< of the unfinished line
  std::string name_, data_;
  bool has_data_ = false, after_cr_ = false;
};

}  // namespace glm53
