#include "cli/bench_stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/strings.h"

namespace glm53::cli {
namespace {

/// An arrival counts as late when all connections were busy this long.
constexpr double kLate = 0.05;

std::string error_class(const BenchSample& sample) {
  if (sample.status == 0) return "connection";
  return sample.status == 200 ? "stream" : cat(sample.status);
}

/// Tokens of a prompt that an earlier request of the run has computed: the session's own last prompt, else what all
/// sessions share, once another one has been answered.
class Reuse {
 public:
  Reuse(const Workload& load, int64_t system_tokens) : load_(load), system_tokens_(system_tokens) {}

  /// Samples must come in the order in which they were sent.
  int64_t reusable(const BenchSample& sample) {
    int64_t tokens = 0;
    if (const auto last = prompts_.find(sample.session); sample.turn > 0 && last != prompts_.end()) {
      tokens = last->second;
    } else if (first_answer_ && *first_answer_ <= sample.sent) {
      tokens = load_.same ? sample.prompt_tokens - 1 : system_tokens_;
    }
    prompts_[sample.session] = sample.prompt_tokens;
    if (!first_answer_ || sample.ended < *first_answer_) first_answer_ = sample.ended;
    return std::min(tokens, sample.prompt_tokens);
  }

 private:
  const Workload& load_;
  const int64_t system_tokens_;
  std::map<size_t, int64_t> prompts_;
  std::optional<double> first_answer_;
};

/// Tokens given and seconds spent, by session or key.
struct Service {
  double tokens = 0, seconds = 0;
  double rate() const { return seconds > 0 ? tokens / seconds : 0; }
};

void add_fairness(std::span<const BenchSample> samples, const Workload& load, BenchSummary& out) {
  std::map<size_t, Service> sessions;
  std::vector<Service> keys(load.key_weights.size());
  std::vector<std::vector<double>> first(keys.size());
  out.keys.resize(keys.size());
  for (const BenchSample& sample : samples) {
    if (sample.end != SampleEnd::finished) continue;
    const auto tokens = static_cast<double>(sample.output_tokens);
    for (Service* service : {&sessions[sample.session], &keys.at(sample.key)}) {
      service->tokens += tokens;
      service->seconds += sample.ended - sample.wanted;
    }
    ++out.keys[sample.key].requests;
    out.keys[sample.key].output_tokens += sample.output_tokens;
    if (sample.first) first[sample.key].push_back(*sample.first - sample.wanted);
  }
  std::vector<double> rates;
  for (const auto& [session, service] : sessions) rates.push_back(service.rate());
  out.session_fairness = jain_index(rates);
  rates.clear();
  for (size_t k = 0; k < keys.size(); ++k) {
    out.keys[k].rate = keys[k].rate();
    out.keys[k].first_token_p50 = spread_of(first[k]).p50;
    if (out.keys[k].requests > 0) rates.push_back(keys[k].rate());
  }
  out.key_fairness = jain_index(rates);
}

double ratio(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  Spread out;
  out.count = values.size();
  if (values.empty()) return out;
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
    return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
  };
  out.p50 = at(0.50);
  out.p95 = at(0.95);
  out.p99 = at(0.99);
  out.max = values.back();
  out.mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  return out;
}

double jain_index(std::span<const double> values) {
  double sum = 0, squares = 0;
  for (const double x : values) {
    sum += x;
    squares += x * x;
  }
  return squares > 0 ? sum * sum / (static_cast<double>(values.size()) * squares) : 1;
}

BenchSummary summarise(std::span<const BenchSample> samples, const Workload& load, int64_t system_tokens) {
  BenchSummary out;
  std::vector<const BenchSample*> by_time;
  for (const BenchSample& sample : samples) by_time.push_back(&sample);
  std::stable_sort(by_time.begin(), by_time.end(),
                   [](const BenchSample* a, const BenchSample* b) { return a->sent < b->sent; });
  Reuse reuse(load, system_tokens);
  std::vector<double> first, gaps, request, lag, each;
  for (const BenchSample* at : by_time) {
    const BenchSample& sample = *at;
    ++out.started;
    out.wall = std::max(out.wall, sample.ended);
    lag.push_back(sample.sent - sample.wanted);
    if (load.rate > 0 && lag.back() > kLate) ++out.late;
    gaps.insert(gaps.end(), sample.gaps.begin(), sample.gaps.end());
    out.output_tokens += sample.output_tokens;
    if (sample.end == SampleEnd::aborted) ++out.aborted;
    if (sample.end == SampleEnd::failed) {
      ++out.failed;
      ++out.errors[error_class(sample)];
      out.error_example.try_emplace(error_class(sample), sample.error);
    }
    if (sample.end != SampleEnd::finished) continue;
    ++out.finished;
    request.push_back(sample.ended - sample.wanted);
    if (sample.first) first.push_back(*sample.first - sample.wanted);
    const double decoding = std::accumulate(sample.gaps.begin(), sample.gaps.end(), 0.0);
    if (sample.output_tokens > 1 && decoding > 0)
      each.push_back(static_cast<double>(sample.output_tokens - 1) / decoding);
    const int64_t reusable = reuse.reusable(sample);
    out.prompt_tokens += sample.prompt_tokens;
    out.cached_tokens += sample.cached_tokens;
    out.reusable_tokens += reusable;
    out.reused_tokens += std::min(reusable, sample.cached_tokens);
  }
  out.first_token = spread_of(std::move(first));
  out.gap = spread_of(std::move(gaps));
  out.request = spread_of(std::move(request));
  out.lag = spread_of(std::move(lag));
  out.tokens_per_second_each = spread_of(std::move(each)).mean;
  out.hit_ratio = ratio(out.cached_tokens, out.prompt_tokens);
  out.reuse_ratio = ratio(out.reused_tokens, out.reusable_tokens);
  add_fairness(samples, load, out);
  return out;
}

}  // namespace glm53::cli
