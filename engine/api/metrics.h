// Prometheus metrics of the API process.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "engine/api/engine_link.h"

namespace glm53::api {

class Metrics {
 public:
  Metrics(const std::string& model_name, int32_t max_context);
  ~Metrics();

  void http(std::string_view handler, std::string_view method, int status, std::chrono::microseconds took);
  void ignored_members(size_t count);
  /// A request that was submitted.
  void submitted(int n, int64_t prompt_tokens, int32_t max_tokens);
  void first_token(double seconds);
  /// Its first step began this long after rank 0 had taken it.
  void queued(double seconds);
  /// `tokens` came `seconds` after the ones before them.
  void next_tokens(double seconds, size_t tokens);
  /// One choice ended: "stop", "length", "abort" or "error".
  void finished(std::string_view reason, int64_t completion_tokens);
  void answered(double seconds);
  uint64_t generated_tokens() const;
  uint64_t prompt_tokens() const;
  /// Text format 0.0.4, with gauges and counters from `status`. Metrics that vLLM has too come twice, as glm53_NAME and
  /// vllm:NAME.
  std::string text(const EngineStatus& status, size_t connections);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace glm53::api
