// The table and the JSON of `glm53ctl bench serve`.
#include <nlohmann/json.hpp>

#include "cli/bench_stats.h"
#include "cli/terminal.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string milliseconds(double seconds) {
  return fixed(seconds * 1000, 1);
}

std::vector<std::string> row(const std::string& name, const Spread& spread) {
  return {name,
          milliseconds(spread.p50),
          milliseconds(spread.p95),
          milliseconds(spread.p99),
          milliseconds(spread.max),
          milliseconds(spread.mean),
          cat(spread.count)};
}

double per_second(int64_t count, double wall) {
  return wall > 0 ? static_cast<double>(count) / wall : 0;
}

std::string percent(double share) {
  return cat(fixed(share * 100, 1), " %");
}

std::string describe(const Workload& load) {
  std::string text = load.rate > 0 ? cat("open loop, ", fixed(load.rate, 2), " requests/s")
                                   : cat("closed loop, ", load.concurrency, " in flight, ", load.sessions, " sessions");
  text += cat(", ", load.turns, " turns of ", load.prompt_tokens, " tokens, answers of ", load.max_tokens);
  if (load.system_tokens > 0) text += cat(", shared system prompt of ", load.system_tokens);
  text += load.same ? ", the same prompts" : ", distinct prompts";
  if (load.think > 0) text += cat(", think ", fixed(load.think, 2), " s");
  if (load.abort_share > 0) text += cat(", ", percent(load.abort_share), " leave early");
  return text + cat(", seed ", load.seed);
}

Json spread_json(const Spread& spread) {
  return {{"p50", spread.p50 * 1000}, {"p95", spread.p95 * 1000},   {"p99", spread.p99 * 1000},
          {"max", spread.max * 1000}, {"mean", spread.mean * 1000}, {"count", spread.count}};
}

}  // namespace

std::string render_bench(const BenchSummary& s, const Workload& load, const std::optional<IdleResult>& idle) {
  std::string out = describe(load) + "\n\n";
  out += render_table({{"ms", "p50", "p95", "p99", "max", "mean", "samples"},
                       row("first token", s.first_token),
                       row("between pieces", s.gap),
                       row("whole request", s.request)});
  std::vector<std::vector<std::string>> rows;
  rows.push_back({"requests", cat(s.finished, " finished, ", s.aborted, " aborted by us, ", s.failed, " failed in ",
                                  fixed(s.wall, 1), " s")});
  for (const auto& [what, count] : s.errors)
    rows.push_back({cat("  ", what), cat(count, ": ", s.error_example.at(what))});
  if (s.late > 0)
    rows.push_back({"late", cat(s.late, " requests waited for a free connection (", milliseconds(s.lag.max),
                                " ms at most): raise --concurrency")});
  rows.push_back({"throughput", cat(fixed(per_second(s.prompt_tokens, s.wall), 1), " tokens/s in, ",
                                    fixed(per_second(s.output_tokens, s.wall), 1), " tokens/s out, ",
                                    fixed(s.tokens_per_second_each, 1), " tokens/s a stream")});
  rows.push_back({"prefix cache", cat(percent(s.hit_ratio), " of ", s.prompt_tokens, " prompt tokens; ",
                                      percent(s.reuse_ratio), " of ", s.reusable_tokens, " reusable ones")});
  rows.push_back({"fairness", cat("sessions ", fixed(s.session_fairness, 3), ", keys ", fixed(s.key_fairness, 3),
                                  " (Jain's index of tokens/s; 1 = equal)")});
  for (size_t k = 0; s.keys.size() > 1 && k < s.keys.size(); ++k) {
    rows.push_back({cat("  key ", k + 1), cat(s.keys[k].requests, " requests, ", s.keys[k].output_tokens, " tokens, ",
                                              fixed(s.keys[k].rate, 1), " tokens/s, first token ",
                                              milliseconds(s.keys[k].first_token_p50), " ms")});
  }
  if (idle) {
    rows.push_back(
        {"idle connections", cat(idle->connections, ": a small request took ", milliseconds(idle->request.p50),
                                 " ms, at most ", milliseconds(idle->request.max), " ms")});
  }
  return out + "\n" + render_table(rows);
}

Json bench_json(const BenchSummary& s, const Workload& load, const std::optional<IdleResult>& idle) {
  Json out = {{"mode", load.rate > 0 ? "open" : "closed"},
              {"rate", load.rate},
              {"concurrency", load.concurrency},
              {"sessions", load.sessions},
              {"turns", load.turns},
              {"system_tokens", load.system_tokens},
              {"prompt_tokens_wanted", load.prompt_tokens},
              {"max_tokens", load.max_tokens},
              {"same", load.same},
              {"think_s", load.think},
              {"abort_share", load.abort_share},
              {"seed", load.seed},
              {"wall_s", s.wall},
              {"requests",
               {{"started", s.started},
                {"finished", s.finished},
                {"aborted", s.aborted},
                {"failed", s.failed},
                {"late", s.late}}}};
  out["errors"] = Json::object();
  for (const auto& [what, count] : s.errors)
    out["errors"][what] = {{"count", count}, {"example", s.error_example.at(what)}};
  out["first_token_ms"] = spread_json(s.first_token);
  out["gap_ms"] = spread_json(s.gap);
  out["request_ms"] = spread_json(s.request);
  out["prompt_tokens"] = s.prompt_tokens;
  out["cached_tokens"] = s.cached_tokens;
  out["output_tokens"] = s.output_tokens;
  out["prompt_tokens_per_s"] = per_second(s.prompt_tokens, s.wall);
  out["output_tokens_per_s"] = per_second(s.output_tokens, s.wall);
  out["output_tokens_per_s_each"] = s.tokens_per_second_each;
  out["hit_ratio"] = s.hit_ratio;
  out["reusable_tokens"] = s.reusable_tokens;
  out["reuse_ratio"] = s.reuse_ratio;
  out["session_fairness"] = s.session_fairness;
  out["key_fairness"] = s.key_fairness;
  out["keys"] = Json::array();
  for (const auto& key : s.keys) {
    out["keys"].push_back({{"requests", key.requests},
                           {"output_tokens", key.output_tokens},
                           {"tokens_per_s", key.rate},
                           {"first_token_ms_p50", key.first_token_p50 * 1000}});
  }
  if (idle) out["idle"] = {{"connections", idle->connections}, {"request_ms", spread_json(idle->request)}};
  return out;
}

}  // namespace glm53::cli
