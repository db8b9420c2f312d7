// What a run of `glm53ctl bench serve` came to: samples to figures, figures to a table and JSON. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/bench_workload.h"

namespace glm53::cli {

enum class SampleEnd { finished, aborted, failed };

/// One request as its client saw it. Times are seconds since the start of the run.
struct BenchSample {
  size_t session = 0, key = 0;
  int turn = 0;
  SampleEnd end = SampleEnd::failed;
  int status = 0;     ///< of HTTP; 0: no answer
  std::string error;  ///< of a failed one
  double wanted = 0;  ///< when it should have been sent: latencies count from here
  double sent = 0, ended = 0;
  std::optional<double> first;  ///< first piece of the answer
  double last = 0;              ///< last piece, or the end of the answer when its last token has no text
  std::vector<double> gaps;     ///< seconds between pieces of the answer
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  int64_t accepted_drafts = 0, rejected_drafts = 0;  ///< tokens that a drafter proposed, by what became of them
  std::string answer, finish;                        ///< finish: "stop", "length", …
};

/// p50, p95, p99 (nearest rank), largest and mean of a list; all 0 when it is empty.
struct Spread {
  size_t count = 0;
  double p50 = 0, p95 = 0, p99 = 0, max = 0, mean = 0;
};
Spread spread_of(std::vector<double> values);

/// Jain's fairness index (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything. 1 for an empty
/// list and for one of zeros.
double jain_index(std::span<const double> values);

struct BenchSummary {
  double wall = 0;  ///< seconds from the start to the last answer
  size_t started = 0, finished = 0, aborted = 0, failed = 0, late = 0;
  std::map<std::string, size_t> errors;              ///< "429", "503", "stream", "connection" -> requests
  std::map<std::string, std::string> error_example;  ///< first message of each
  Spread first_token, gap, request, lag;             ///< seconds; of finished requests, gaps of all
  double tokens_per_second_each = 0;                 ///< of one stream after its first token, mean
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, reusable_tokens = 0, reused_tokens = 0;
  double hit_ratio = 0;    ///< cached of all prompt tokens
  double reuse_ratio = 0;  ///< reused of those that an earlier request had computed
  double session_fairness = 1, key_fairness = 1;
  struct Key {
    size_t requests = 0;
    int64_t output_tokens = 0;
    double rate = 0, first_token_p50 = 0;
  };
  std::vector<Key> keys;
};
/// `system_tokens`: of the shared system prompt as the server counts them.
BenchSummary summarise(std::span<const BenchSample> samples, const Workload& load, int64_t system_tokens);

/// GET /v1/models beside idle connections; seconds.
struct IdleResult {
  size_t connections = 0;
  Spread request;
};
std::string render_bench(const BenchSummary& summary, const Workload& load, const std::optional<IdleResult>& idle);
nlohmann::ordered_json bench_json(const BenchSummary& summary, const Workload& load,
                                  const std::optional<IdleResult>& idle);

}  // namespace glm53::cli
