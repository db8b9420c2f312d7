#include "engine/api/metrics.h"

#include <algorithm>
#include <array>
#include <mutex>

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

namespace glm53::api {

namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using Buckets = Histogram::BucketBoundaries;

const Buckets kFirstToken = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                             1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
const Buckets kBetweenTokens = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
const Buckets kRequest = {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const Buckets kHttp = {0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300};

/// After "glm53_" and "vllm:".
constexpr std::array<std::string_view, 21> kOfVllm = {"num_requests_running",
                                                      "num_requests_waiting",
                                                      "kv_cache_usage_perc",
                                                      "prefix_cache_queries_total",
                                                      "prefix_cache_hits_total",
                                                      "num_preemptions_total",
                                                      "prompt_tokens_total",
                                                      "generation_tokens_total",
                                                      "time_to_first_token_seconds",
                                                      "inter_token_latency_seconds",
                                                      "e2e_request_latency_seconds",
                                                      "request_queue_time_seconds",
                                                      "request_prompt_tokens",
                                                      "request_generation_tokens",
                                                      "request_params_max_tokens",
                                                      "request_params_n",
                                                      "request_success_total",
                                                      "spec_decode_num_drafts_total",
                                                      "spec_decode_num_draft_tokens_total",
                                                      "spec_decode_num_accepted_tokens_total",
                                                      "spec_decode_num_accepted_tokens_per_pos_total"};
constexpr std::string_view kPrefix = "glm53_";
constexpr double kMicrosecond = 1e-6;

void add_vllm_names(std::vector<prometheus::MetricFamily>& families) {
  const size_t own = families.size();
  for (size_t i = 0; i < own; ++i) {
    const std::string_view name = families[i].name;
    if (!name.starts_with(kPrefix)) continue;
    const std::string_view rest = name.substr(kPrefix.size());
    if (std::find(kOfVllm.begin(), kOfVllm.end(), rest) == kOfVllm.end()) continue;
    prometheus::MetricFamily copy = families[i];
    copy.name = "vllm:" + std::string(rest);
    families.push_back(std::move(copy));
  }
}

Buckets one_two_five(int32_t limit) {
  Buckets out;
  for (int64_t decade = 1; decade <= limit; decade *= 10) {
    for (const int64_t step : {1, 2, 5}) {
      if (decade * step <= limit) out.push_back(static_cast<double>(decade * step));
    }
  }
  return out;
}

/// A counter of the ranks, which begins again with each generation of them.
struct RankCounter {
  Counter& total;
  uint64_t seen = 0;

  double unit = 1;  ///< of the ranks' figure in the counter's

  void follow(uint64_t now) {
    total.Increment(static_cast<double>(now >= seen ? now - seen : now) * unit);
    seen = now;
  }
};

}  // namespace

struct Metrics::Impl {
  Impl(const std::string& model, int32_t max_context)
      : labels{{"model_name", model}, {"engine", "0"}}, lengths(one_two_five(max_context)) {
    for (const std::string_view stage : wire::kStages) {
      const prometheus::Labels label = {{"stage", std::string(stage)}};
      stages.push_back({{stage_time.Add(label), 0, kMicrosecond}, {stage_read.Add(label)}});
    }
    accepted_at.push_back({accepted_family.Add({{"position", "0"}})});
    const Buckets buckets(wire::kStepBuckets.begin(), wire::kStepBuckets.end());
    for (const std::string_view kind : wire::kStepKinds)
      step_kinds.push_back({step_time.Add({{"kind", std::string(kind)}}, buckets), 0,
                            std::vector<uint64_t>(wire::kStepBuckets.size() + 1)});
  }

  /// Steps since the last look; the ranks' figures begin again with each generation.
  void follow_steps(const wire::Stats& stats) {
    for (size_t i = 0; i < stages.size(); ++i) {
      stages[i].us.follow(stats.stage_us.at(i));
      stages[i].bytes.follow(stats.stage_bytes.at(i));
    }
    const size_t width = wire::kStepBuckets.size() + 1;
    for (size_t kind = 0; kind < step_kinds.size(); ++kind) {
      StepHistogram& h = step_kinds[kind];
      const bool anew = stats.step_us.at(kind) < h.us;
      const double us = static_cast<double>(stats.step_us.at(kind) - (anew ? 0 : h.us));
      std::vector<double> more(width);
      for (size_t b = 0; b < width; ++b) {
        const uint64_t now = stats.step_counts.at(kind * width + b);
        more[b] = static_cast<double>(now - (anew || now < h.counts[b] ? 0 : h.counts[b]));
        h.counts[b] = now;
      }
      h.us = stats.step_us.at(kind);
      h.histogram.ObserveMultiple(more, us * kMicrosecond);
    }
  }

  Counter& counter(const std::string& name, const std::string& help, const prometheus::Labels& extra = {}) {
    return prometheus::BuildCounter().Name(name).Help(help).Labels(labels).Register(registry).Add(extra);
  }
  prometheus::Family<Counter>& family(const std::string& name, const std::string& help) {
    return prometheus::BuildCounter().Name(name).Help(help).Labels(labels).Register(registry);
  }
  Gauge& gauge(const std::string& name, const std::string& help) {
    return prometheus::BuildGauge().Name(name).Help(help).Labels(labels).Register(registry).Add({});
  }
  Histogram& histogram(const std::string& name, const std::string& help, const Buckets& buckets) {
    return prometheus::BuildHistogram().Name(name).Help(help).Labels(labels).Register(registry).Add({}, buckets);
  }

  prometheus::Registry registry;
  std::mutex follow_mutex;
  prometheus::Labels labels;
  Buckets lengths;

  Gauge& running = gauge("glm53_num_requests_running", "Sequences the engine works on.");
  Gauge& waiting = gauge("glm53_num_requests_waiting", "Requests that wait.");
  Gauge& cache_usage = gauge("glm53_kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.");
  Gauge& blocks_cached = gauge("glm53_prefix_cache_blocks", "Blocks that the prefix cache holds.");
  Gauge& snapshots = gauge("glm53_prefix_cache_snapshots", "Snapshots that the prefix cache holds.");
  Gauge& snapshots_total = gauge("glm53_prefix_cache_snapshot_slots", "Snapshots that the prefix cache has room for.");
  Gauge& slots_used = gauge("glm53_state_slots_used", "State slots in use.");
  Gauge& generation = gauge("glm53_rank_generation", "Generation of the connected rank.");
  Gauge& connected = gauge("glm53_rank_connected", "1 while a rank is connected.");
  Gauge& progress_age = gauge("glm53_progress_age_seconds", "Time since the step loop turned.");
  Gauge& rank_memory = gauge("glm53_rank_memory_bytes", "Resident size of rank 0.");
  Gauge& slots_total = gauge("glm53_state_slots", "State slots that exist.");
  Gauge& blocks_used = gauge("glm53_kv_blocks_used", "KV blocks of running requests, 64 tokens each.");
  Gauge& blocks_total = gauge("glm53_kv_blocks", "KV blocks that exist.");
  Gauge& memory_available = gauge("glm53_memory_available_bytes", "MemAvailable on the machine of rank 0.");
  Gauge& memory_level = gauge("glm53_memory_level", "Memory guard, worst of all ranks: 0 ok ... 3 critical.");
  Gauge& gate_open = gauge("glm53_gate_open", "1 while requests are admitted.");
  RankCounter steps{counter("glm53_steps_total", "Steps of the ranks.")};
  RankCounter computed{counter("glm53_computed_prompt_tokens_total", "Prompt tokens that the ranks computed.")};
  Histogram& queue = histogram("glm53_request_queue_time_seconds", "From request to its first step.", kRequest);
  Gauge& connections = gauge("glm53_http_connections", "Open client connections.");
  Counter& prompt_tokens = counter("glm53_prompt_tokens_total", "Prompt tokens of submitted requests.");
  Counter& generation_tokens = counter("glm53_generation_tokens_total", "Tokens sampled.");
  RankCounter prefix_queries{
      counter("glm53_prefix_cache_queries_total", "Prompt tokens of admitted requests that were looked up.")};
  RankCounter prefix_hits{counter("glm53_prefix_cache_hits_total", "Of these, tokens that were not computed again.")};
  RankCounter snapshots_written{counter("glm53_prefix_cache_snapshots_written_total", "Snapshots registered.")};
  RankCounter snapshots_evicted{counter("glm53_prefix_cache_snapshots_evicted_total", "Snapshots given up.")};
  RankCounter blocks_evicted{counter("glm53_prefix_cache_blocks_evicted_total", "Blocks given up.")};
  RankCounter preemptions{counter("glm53_num_preemptions_total", "Running requests put back to wait.")};
  Gauge& spill_memory = gauge("glm53_spill_memory_bytes", "Evicted cache of rank 0 that is kept in host memory.");
  Gauge& spill_disk = gauge("glm53_spill_disk_bytes", "Evicted cache of rank 0 that is kept on disk.");
  Gauge& spill_disk_ok = gauge("glm53_spill_disk_ok", "1 while evicted cache is written to disk.");
  RankCounter spilled{counter("glm53_spilled_total", "Evicted blocks and snapshots copied to the spill tier.")};
  RankCounter spill_dropped{counter("glm53_spill_dropped_total", "Of these, not taken: its queue was full.")};
  RankCounter restores{counter("glm53_restores_total", "Prompts whose beginning came back from the spill tier.")};
  RankCounter restores_failed{counter("glm53_restores_failed_total", "Prompts for which that failed.")};
  RankCounter drafts{counter("glm53_spec_decode_num_drafts_total", "Steps of sequences with drafts.")};
  RankCounter draft_tokens{counter("glm53_spec_decode_num_draft_tokens_total", "Drafts that were verified.")};
  RankCounter draft_accepted{counter("glm53_spec_decode_num_accepted_tokens_total", "Of these, accepted.")};
  prometheus::Family<Counter>& accepted_family = family("glm53_spec_decode_num_accepted_tokens_per_pos_total",
                                                        "Accepted drafts by their position behind the last token.");
  std::vector<RankCounter> accepted_at;  // guarded by follow_mutex
  Gauge& drafter_paused = gauge("glm53_drafter_paused", "1 when the drafter's drafts were hardly ever accepted.");
  prometheus::Family<Counter>& stage_time =
      family("glm53_step_stage_seconds_total", "Time of steps on rank 0, by stage.");
  prometheus::Family<Counter>& stage_read = family(
      "glm53_step_stage_bytes_total", "Bytes of weights that steps read on rank 0, by stage, where that is known.");
  prometheus::Family<Histogram>& step_time =
      prometheus::BuildHistogram()
          .Name("glm53_step_seconds")
          .Help("Time of a step: decode reads no prompt, prefill generates nothing.")
          .Labels(labels)
          .Register(registry);
  struct StageCounters {
    RankCounter us, bytes;
  };
  std::vector<StageCounters> stages;  // guarded by follow_mutex
  struct StepHistogram {
    Histogram& histogram;
    uint64_t us = 0;
    std::vector<uint64_t> counts;
  };
  std::vector<StepHistogram> step_kinds;  // guarded by follow_mutex
  Counter& ignored = counter("glm53_ignored_members_total", "Unknown members of requests.");
  Histogram& ttft = histogram("glm53_time_to_first_token_seconds", "From request to first token.", kFirstToken);
  Histogram& itl = histogram("glm53_inter_token_latency_seconds", "Between tokens.", kBetweenTokens);
  Histogram& e2e = histogram("glm53_e2e_request_latency_seconds", "From request to the end of the answer.", kRequest);
  Histogram& prompt_length = histogram("glm53_request_prompt_tokens", "Prompt tokens of a request.", lengths);
  Histogram& output_length = histogram("glm53_request_generation_tokens", "Tokens of a choice.", lengths);
  Histogram& max_tokens = histogram("glm53_request_params_max_tokens", "Output limit of a request.", lengths);
  Histogram& choices = histogram("glm53_request_params_n", "Choices of a request.", {1, 2, 5, 10, 20});
  prometheus::Family<Counter>& success = prometheus::BuildCounter()
                                             .Name("glm53_request_success_total")
                                             .Help("Choices that ended, by reason.")
                                             .Labels(labels)
                                             .Register(registry);
  prometheus::Family<Counter>& requests =
      prometheus::BuildCounter().Name("http_requests_total").Help("HTTP requests.").Register(registry);
  Histogram& http_time = prometheus::BuildHistogram()
                             .Name("http_request_duration_seconds")
                             .Help("Time to answer an HTTP request.")
                             .Register(registry)
                             .Add({}, kHttp);
};

Metrics::Metrics(const std::string& model_name, int32_t max_context)
    : impl_(std::make_unique<Impl>(model_name, max_context)) {
  for (const char* reason : {"stop", "length", "abort", "error"}) impl_->success.Add({{"finished_reason", reason}});
}

Metrics::~Metrics() = default;

void Metrics::http(std::string_view handler, std::string_view method, int status, std::chrono::microseconds took) {
  impl_->requests
      .Add({{"handler", std::string(handler)}, {"method", std::string(method)}, {"status", std::to_string(status)}})
      .Increment();
  impl_->http_time.Observe(std::chrono::duration<double>(took).count());
}

void Metrics::ignored_members(size_t count) {
  impl_->ignored.Increment(static_cast<double>(count));
}

void Metrics::submitted(int n, int64_t prompt_tokens, int32_t max_tokens) {
  impl_->prompt_tokens.Increment(static_cast<double>(prompt_tokens));
  impl_->prompt_length.Observe(static_cast<double>(prompt_tokens));
  impl_->choices.Observe(n);
  impl_->max_tokens.Observe(max_tokens);
}

void Metrics::first_token(double seconds) {
  impl_->ttft.Observe(seconds);
}

void Metrics::queued(double seconds) {
  impl_->queue.Observe(seconds);
}

void Metrics::next_tokens(double seconds, size_t tokens) {
  if (tokens == 0) return;
  impl_->generation_tokens.Increment(static_cast<double>(tokens));
  if (seconds < 0) return;
  for (size_t i = 0; i < tokens; ++i) impl_->itl.Observe(seconds / static_cast<double>(tokens));
}

void Metrics::finished(std::string_view reason, int64_t completion_tokens) {
  impl_->success.Add({{"finished_reason", std::string(reason)}}).Increment();
  impl_->output_length.Observe(static_cast<double>(completion_tokens));
}

void Metrics::answered(double seconds) {
  impl_->e2e.Observe(seconds);
}

uint64_t Metrics::generated_tokens() const {
  return static_cast<uint64_t>(impl_->generation_tokens.Value());
}

uint64_t Metrics::prompt_tokens() const {
  return static_cast<uint64_t>(impl_->prompt_tokens.Value());
}

std::string Metrics::text(const EngineStatus& s, size_t connections) {
  const auto as_double = [](auto v) { return static_cast<double>(v); };
  impl_->running.Set(as_double(s.connected ? s.stats.running : 0));
  impl_->waiting.Set(as_double(s.unfinished - std::min<size_t>(s.unfinished, s.connected ? s.stats.running : 0)));
  impl_->cache_usage.Set(s.stats.blocks_total == 0 ? 0 : as_double(s.stats.blocks_used) / s.stats.blocks_total);
  impl_->blocks_cached.Set(as_double(s.stats.blocks_cached));
  impl_->snapshots.Set(as_double(s.stats.snaps_used));
  impl_->snapshots_total.Set(as_double(s.stats.snaps_total));
  impl_->spill_memory.Set(as_double(s.stats.spill_memory_bytes));
  impl_->spill_disk.Set(as_double(s.stats.spill_disk_bytes));
  impl_->drafter_paused.Set(s.stats.drafter_paused ? 1 : 0);
  impl_->spill_disk_ok.Set(s.stats.spill_disk_ok ? 1 : 0);
  {
    const std::scoped_lock lock(impl_->follow_mutex);
    impl_->prefix_queries.follow(s.stats.prefix_queries);
    impl_->prefix_hits.follow(s.stats.prefix_hits);
    impl_->snapshots_written.follow(s.stats.snaps_written);
    impl_->snapshots_evicted.follow(s.stats.snaps_evicted);
    impl_->blocks_evicted.follow(s.stats.blocks_evicted);
    impl_->preemptions.follow(s.stats.preemptions);
    impl_->spilled.follow(s.stats.spilled);
    impl_->spill_dropped.follow(s.stats.spill_dropped);
    impl_->restores.follow(s.stats.restores);
    impl_->restores_failed.follow(s.stats.restores_failed);
    impl_->drafts.follow(s.stats.draft_steps);
    impl_->draft_tokens.follow(s.stats.draft_tokens);
    impl_->draft_accepted.follow(s.stats.draft_accepted);
    for (size_t i = 0; i < s.stats.draft_accepted_at.size(); ++i) {
      if (i == impl_->accepted_at.size())
        impl_->accepted_at.push_back({impl_->accepted_family.Add({{"position", std::to_string(i)}})});
      impl_->accepted_at[i].follow(s.stats.draft_accepted_at[i]);
    }
  }
  impl_->slots_used.Set(as_double(s.stats.slots_used));
  impl_->generation.Set(as_double(s.generation));
  impl_->connected.Set(s.connected ? 1 : 0);
  impl_->progress_age.Set(as_double(s.progress_age_ms) / 1000);
  impl_->rank_memory.Set(as_double(s.stats.memory_bytes));
  impl_->slots_total.Set(as_double(s.stats.slots_total));
  impl_->blocks_used.Set(as_double(s.stats.blocks_used));
  impl_->blocks_total.Set(as_double(s.stats.blocks_total));
  impl_->memory_available.Set(as_double(s.stats.memory_available));
  impl_->memory_level.Set(as_double(s.stats.memory_level));
  impl_->gate_open.Set(s.gate_open ? 1 : 0);
  impl_->connections.Set(as_double(connections));
  {
    const std::scoped_lock lock(impl_->follow_mutex);
    impl_->steps.follow(s.stats.step);
    impl_->follow_steps(s.stats);
    impl_->computed.follow(s.stats.prompt_tokens);
  }
  auto families = impl_->registry.Collect();
  add_vllm_names(families);
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace glm53::api
