// The clients of `glm53ctl bench`: threads that send the requests of a workload and take the times.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_stats.h"
#include "cli/bench_workload.h"

namespace glm53::cli {

struct BenchTarget {
  std::string api;
  std::vector<std::string> keys;  ///< one for each weight of the workload; "" = none
};

/// Tokens of a text by the server's own count; nothing when it has no /tokenize. Throws Error(denied) for a bad key,
/// Error(unavailable) when nobody answers.
std::optional<int64_t> count_tokens(const BenchTarget& target, const std::string& text);

struct StreamedRequest {
  std::string api, key, body;  ///< body: of POST /v1/chat/completions
  double timeout = 600;        ///< longest silence of the server, seconds
  std::optional<AbortPoint> abort;
};
/// Sends it and takes the times, in seconds since `start`, into `about`. A failed request is a sample, not an
/// exception.
BenchSample stream_chat(const StreamedRequest& request, std::chrono::steady_clock::time_point start,
                        BenchSample about = {});

/// Runs the workload to its end: one thread a request in flight. Failed requests are samples, not exceptions.
std::vector<BenchSample> run_load(const BenchTarget& target, const Workload& load, double tokens_per_word);

/// Holds idle connections while it lives. Throws Error(unavailable) when the server does not take so many.
class IdleConnections {
 public:
  IdleConnections(const BenchTarget& target, int count);
  ~IdleConnections();
  IdleConnections(const IdleConnections&) = delete;
  IdleConnections& operator=(const IdleConnections&) = delete;
  /// Time of a small request on a new connection beside them, 50 times.
  IdleResult measure() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace glm53::cli
