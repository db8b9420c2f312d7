// glm53ctl bench serve: load on a /v1 endpoint, and what its clients saw.
#include <nlohmann/json.hpp>

#include "cli/api_target.h"
#include "cli/bench_client.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

constexpr size_t kSampleWords = 400;
/// Where the server does not say: about what word-piece tokenizers make of English.
constexpr double kTokensPerWord = 1.3;

BenchTarget target_of(const ApiTarget& api, const Workload& load) {
  BenchTarget target{api.url, {}};
  const size_t wanted = load.key_weights.size();
  if (api.key_file.empty()) {
    if (wanted > 1) throw Error(Code::usage, "--keys needs a file of keys", "--key-file FILE");
    target.keys.emplace_back();
    return target;
  }
  target.keys = read_api_keys(api.key_file);
  if (target.keys.size() < wanted) {
    throw Error(Code::usage, cat(api.key_file, " holds ", target.keys.size(), " keys, --keys asks for ", wanted));
  }
  target.keys.resize(wanted);
  return target;
}

double tokens_per_word(const BenchTarget& target) {
  const auto count = count_tokens(target, random_text(1, kSampleWords));
  return count && *count > 0 ? static_cast<double>(*count) / static_cast<double>(kSampleWords) : kTokensPerWord;
}

}  // namespace

int run_bench_serve(const GlobalOptions& global, const BenchOptions& options) {
  const Workload load = checked_workload(options);
  const BenchTarget target = target_of(resolve_api(global, {options.api, options.key_file}), load);
  const double per_word = tokens_per_word(target);
  int64_t system_tokens = load.system_tokens;
  if (system_tokens > 0) system_tokens = count_tokens(target, system_prompt(load, per_word)).value_or(system_tokens);

  std::optional<IdleConnections> idle;
  std::optional<IdleResult> beside_idle;
  if (load.idle_connections > 0) {
    idle.emplace(target, load.idle_connections);
    beside_idle = idle->measure();
  }
  const std::vector<BenchSample> samples = run_load(target, load, per_word);
  const BenchSummary summary = summarise(samples, load, system_tokens);
  if (global.json) {
    print_line(dump(bench_json(summary, load, beside_idle)));
  } else {
    print(render_bench(summary, load, beside_idle));
  }
  return summary.finished > 0 || summary.failed == 0 ? 0 : 1;
}

}  // namespace glm53::cli
