// The table and the JSON of `glm53ctl bench decode`.
#include <nlohmann/json.hpp>

#include "cli/bench_decode.h"
#include "cli/terminal.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kFaultsShown = 10;

std::string spread(const Middle& m, int digits) {
  return cat(fixed(m.median, digits), " (", fixed(m.low, digits), "-", fixed(m.high, digits), ")");
}

Middle in_milliseconds(const Middle& m) {
  return {m.median * 1000, m.low * 1000, m.high * 1000};
}

Json middle_json(const Middle& m) {
  return {{"median", m.median}, {"low", m.low}, {"high", m.high}};
}

/// The result of the same cell without drafts, when it was measured beside it.
const DecodeResult* without_drafts(std::span<const DecodeResult> results, const DecodeResult& of) {
  if (of.cell.speculation == "off") return nullptr;
  for (const DecodeResult& other : results) {
    if (other.cell.speculation == "off" && other.cell.phase == of.cell.phase && other.cell.streams == of.cell.streams)
      return &other;
  }
  return nullptr;
}

/// How much faster than without drafts; nullopt when nothing was measured.
std::optional<double> gain(std::span<const DecodeResult> results, const DecodeResult& of) {
  const DecodeResult* off = without_drafts(results, of);
  if (off == nullptr || off->all.median <= 0) return std::nullopt;
  return of.all.median / off->all.median;
}

size_t failed_of(const DecodeResult& result) {
  size_t failed = 0;
  for (const DecodeRun& run : result.runs) failed += run.failed;
  return failed;
}

std::string coherence_line(const DecodePlan& plan, const Coherence& coherence) {
  if (!plan.coherence) return "coherence: not checked\n";
  if (coherence.faults().empty())
    return cat("coherence: ", coherence.answers(), " answers are sound, and equal where the prompt is\n");
  std::string text = cat("coherence: ", coherence.faults().size(), " faults in ", coherence.answers(), " answers\n");
  for (size_t i = 0; i < coherence.faults().size() && i < kFaultsShown; ++i)
    text += cat("  ", coherence.faults()[i], "\n");
  return text;
}

Json run_json(const DecodeRun& run) {
  Json json = {{"tokens_per_s_each", run.each},      {"tokens_per_s_all", run.all},
               {"first_token_s", run.first_token},   {"tokens_a_step", run.tokens_a_step},
               {"output_tokens", run.output_tokens}, {"accepted_drafts", run.accepted},
               {"rejected_drafts", run.rejected},    {"failed", run.failed}};
  if (!run.error.empty()) json["error"] = run.error;
  return json;
}

}  // namespace

std::string render_decode(std::span<const DecodeResult> results, const DecodePlan& plan, const Coherence& coherence) {
  const bool compared = plan.modes.size() > 1;
  std::vector<std::vector<std::string>> rows = {{"phase", "streams", "drafts", "tokens/s a stream", "tokens/s in all",
                                                 "first token, ms", "tokens a step", "accepted"}};
  if (compared) rows.front().emplace_back("with/without");
  for (const DecodeResult& r : results) {
    rows.push_back({r.cell.phase, cat(r.cell.streams), r.cell.speculation, spread(r.each, 1), spread(r.all, 1),
                    spread(in_milliseconds(r.first_token), 1), spread(r.tokens_a_step, 2),
                    cat(fixed(r.accepted_share * 100, 1), " %")});
    const auto ratio = gain(results, r);
    if (compared) rows.back().push_back(ratio ? fixed(*ratio, 2) : "");
  }
  std::string out =
      cat("median (lowest-highest) of ", plan.runs, " runs, ", plan.same ? "the same" : "distinct",
          " prompts, answers of at most ", plan.max_tokens, " tokens, greedy\n\n", render_table(rows), "\n");
  for (const DecodeResult& r : results) {
    if (const size_t failed = failed_of(r); failed > 0) {
      const auto with = std::ranges::find_if(r.runs, [](const DecodeRun& run) { return !run.error.empty(); });
      out += cat(r.cell.phase, ", ", r.cell.streams, " streams: ", failed,
                 " requests failed: ", with == r.runs.end() ? "" : with->error, "\n");
    }
  }
  return out + coherence_line(plan, coherence);
}

Json decode_json(std::span<const DecodeResult> results, const DecodePlan& plan, const Coherence& coherence,
                 const std::string& model) {
  Json out = {{"model", model},
              {"runs", plan.runs},
              {"warm_up", plan.warm_up},
              {"max_tokens", plan.max_tokens},
              {"same", plan.same}};
  out["cells"] = Json::array();
  for (const DecodeResult& r : results) {
    Json cell = {{"phase", r.cell.phase},
                 {"streams", r.cell.streams},
                 {"speculation", r.cell.speculation},
                 {"tokens_per_s_each", middle_json(r.each)},
                 {"tokens_per_s_all", middle_json(r.all)},
                 {"first_token_s", middle_json(r.first_token)},
                 {"tokens_a_step", middle_json(r.tokens_a_step)},
                 {"accepted_share", r.accepted_share},
                 {"failed", failed_of(r)}};
    if (const auto ratio = gain(results, r)) cell["gain"] = *ratio;
    cell["runs"] = Json::array();
    for (const DecodeRun& run : r.runs) cell["runs"].push_back(run_json(run));
    out["cells"].push_back(std::move(cell));
  }
  out["coherence"] = {{"checked", plan.coherence ? coherence.answers() : 0}, {"faults", coherence.faults()}};
  return out;
}

}  // namespace glm53::cli
