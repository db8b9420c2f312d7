// /metrics: what is there from the start, names of vLLM, counters of ranks that start anew, and the dashboard.
#include <algorithm>
#include <regex>
#include <set>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/api/metrics.h"

using namespace glm53;
using namespace glm53::api;

namespace {

/// Names of the samples in a text.
std::set<std::string> names_in(const std::string& text) {
  std::set<std::string> names;
  for (const std::string& line : split(text, '\n')) {
    if (line.empty() || line.front() == '#') continue;
    names.insert(line.substr(0, line.find_first_of("{ ")));
  }
  return names;
}

double value_of(const std::string& text, const std::string& name) {
  for (const std::string& line : split(text, '\n')) {
    if (!line.starts_with(name + "{")) continue;
    return parse_double(line.substr(line.rfind(' ') + 1)).value_or(-1);
  }
  return -1;
}

void collect_expressions(const nlohmann::ordered_json& json, std::vector<std::string>& out) {
  if (json.is_object() && json.contains("expr")) out.push_back(json["expr"].get<std::string>());
  if (!json.is_structured()) return;
  for (const auto& member : json) collect_expressions(member, out);
}

}  // namespace

TEST_CASE("every metric that the dashboard uses is exported, from the first scrape") {
  Metrics metrics("GLM", 4096);
  metrics.http("/metrics", "GET", 200, std::chrono::microseconds(10));
  const std::set<std::string> exported = names_in(metrics.text({}, 0));
  std::vector<std::string> expressions;
  collect_expressions(parse_json(read_file(std::string(GLM53_SOURCE_DIR) + "/docs/grafana/glm53.json")), expressions);
  CHECK(expressions.size() > 15);
  const std::regex name("(glm53_|http_|vllm:)[a-z0-9_]+");
  size_t used = 0;
  for (const std::string& expression : expressions) {
    INFO(expression);
    const std::sregex_iterator begin(expression.begin(), expression.end(), name), end;
    CHECK(begin != end);
    for (auto at = begin; at != end; ++at, ++used) {
      INFO(at->str());
      CHECK(exported.contains(at->str()));
    }
  }
  CHECK(used > 20);
}

TEST_CASE("metrics that vLLM has too have its names as well, with the same values") {
  Metrics metrics("GLM", 4096);
  EngineStatus status;
  status.connected = true;
  status.stats.running = 3;
  status.stats.prefix_queries = 100;
  status.stats.prefix_hits = 40;
  metrics.first_token(0.2);
  metrics.queued(0.1);
  const std::string text = metrics.text(status, 0);
  for (const char* name :
       {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count", "request_success_total"}) {
    INFO(name);
    CHECK(value_of(text, cat("glm53_", name)) >= 0);
    CHECK(value_of(text, cat("glm53_", name)) == value_of(text, cat("vllm:", name)));
  }
  CHECK(value_of(text, "vllm:num_requests_running") == 3);
  CHECK(value_of(text, "vllm:prefix_cache_hits_total") == 40);
  CHECK(value_of(text, "vllm:time_to_first_token_seconds_count") == 1);
  CHECK(value_of(text, "glm53_request_queue_time_seconds_sum") == doctest::Approx(0.1));
}

TEST_CASE("counts of a rank go on when the next generation starts at zero") {
  Metrics metrics("GLM", 4096);
  EngineStatus status;
  status.stats.step = 10;
  status.stats.memory_level = 2;
  CHECK(value_of(metrics.text(status, 0), "glm53_steps_total") == 10);
  CHECK(value_of(metrics.text(status, 0), "glm53_steps_total") == 10);
  status.stats.step = 4;  // a new generation
  const std::string text = metrics.text(status, 7);
  CHECK(value_of(text, "glm53_steps_total") == 14);
  CHECK(value_of(text, "glm53_memory_level") == 2);
  CHECK(value_of(text, "glm53_http_connections") == 7);
}

TEST_CASE("steps and their stages are summed over generations of ranks") {
  Metrics metrics("GLM", 4096);
  const auto value = [](const std::string& text, const std::string& line) {
    for (const std::string& one : split(text, '\n')) {
      if (one.starts_with(line + " ") || (one.starts_with(line) && line.ends_with("}")))
        return parse_double(one.substr(one.rfind(' ') + 1)).value_or(-1);
    }
    return -1.0;
  };
  EngineStatus status;
  status.connected = true;
  status.stats.stage_us[4] = 3'000'000;
  status.stats.stage_bytes[4] = 6'000;
  status.stats.step_us[0] = 2'000'000;
  status.stats.step_counts[2] = 10;                         // decode, up to 5 ms
  status.stats.step_counts[wire::kStepBuckets.size()] = 1;  // decode, over all bounds
  metrics.text(status, 0);
  status.stats.step_counts[2] = 15;
  status.stats.step_us[0] = 2'500'000;
  metrics.text(status, 0);
  status.stats = {};  // another generation
  status.stats.stage_us[4] = 500'000;
  status.stats.step_counts[2] = 2;
  status.stats.step_us[0] = 250'000;
  const std::string text = metrics.text(status, 0);
  const std::string common = R"(engine="0",model_name="GLM",)";
  CAPTURE(text);
  CHECK(value(text, "glm53_step_stage_seconds_total{" + common + "stage=\"forward\"}") == doctest::Approx(3.5));
  CHECK(value(text, "glm53_step_stage_bytes_total{" + common + "stage=\"forward\"}") == 6000);
  CHECK(value(text, "glm53_step_stage_seconds_total{" + common + "stage=\"draft\"}") == 0);
  CHECK(value(text, "glm53_step_seconds_count{" + common + "kind=\"decode\"}") == 18);
  CHECK(value(text, "glm53_step_seconds_sum{" + common + "kind=\"decode\"}") == doctest::Approx(2.75));
  CHECK(value(text, "glm53_step_seconds_bucket{" + common + "kind=\"decode\",le=\"0.005\"}") == 17);
  CHECK(value(text, "glm53_step_seconds_count{" + common + "kind=\"prefill\"}") == 0);
}
