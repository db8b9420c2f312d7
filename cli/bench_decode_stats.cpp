// Samples of `glm53ctl bench decode` to figures, and answers to faults.
#include <algorithm>
#include <numeric>

#include "cli/bench_decode.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

double mean(std::span<const double> values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// Per run, by a function of the run; runs without an answer are left out.
template <class F>
Middle middle_by(const std::vector<DecodeRun>& runs, const F& value) {
  std::vector<double> values;
  for (const DecodeRun& run : runs) {
    if (!run.each.empty()) values.push_back(value(run));
  }
  return middle_of(std::move(values));
}

}  // namespace

DecodeRun decode_run(std::span<const BenchSample> samples) {
  DecodeRun run;
  std::vector<double> first;
  double begin = 0, end = 0;
  int64_t tokens = 0;  // behind the first one of each stream
  for (const BenchSample& sample : samples) {
    const bool answered = sample.end == SampleEnd::finished && sample.first;
    if (!answered || sample.output_tokens < 2 || sample.last <= *sample.first) {
      ++run.failed;
      if (run.error.empty()) run.error = answered ? "an answer of one token" : sample.error;
      continue;
    }
    begin = run.each.empty() ? *sample.first : std::min(begin, *sample.first);
    end = std::max(end, sample.last);
    tokens += sample.output_tokens - 1;
    run.each.push_back(static_cast<double>(sample.output_tokens - 1) / (sample.last - *sample.first));
    first.push_back(*sample.first - sample.sent);
    run.output_tokens += sample.output_tokens;
    run.accepted += sample.accepted_drafts;
    run.rejected += sample.rejected_drafts;
  }
  if (run.each.empty()) return run;
  run.all = static_cast<double>(tokens) / (end - begin);
  run.first_token = mean(first);
  // Every step gives one token of its own and those of the drafts that it accepts.
  const int64_t steps = std::max<int64_t>(1, tokens - run.accepted);
  run.tokens_a_step = static_cast<double>(tokens) / static_cast<double>(steps);
  return run;
}

Middle middle_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
  return {median, values.front(), values.back()};
}

DecodeResult summarise_decode(DecodeCell cell, std::vector<DecodeRun> runs) {
  DecodeResult result;
  result.cell = std::move(cell);
  result.each = middle_by(runs, [](const DecodeRun& run) { return mean(run.each); });
  result.all = middle_by(runs, [](const DecodeRun& run) { return run.all; });
  result.first_token = middle_by(runs, [](const DecodeRun& run) { return run.first_token; });
  result.tokens_a_step = middle_by(runs, [](const DecodeRun& run) { return run.tokens_a_step; });
  int64_t accepted = 0, drafts = 0;
  for (const DecodeRun& run : runs) {
    accepted += run.accepted;
    drafts += run.accepted + run.rejected;
  }
  if (drafts > 0) result.accepted_share = static_cast<double>(accepted) / static_cast<double>(drafts);
  result.runs = std::move(runs);
  return result;
}

void Coherence::take(const DecodePrompt& prompt, const std::string& where, const BenchSample& sample) {
  if (sample.end != SampleEnd::finished) return;
  ++answers_;
  if (const auto fault = incoherent(prompt, sample.answer, sample.finish == "stop"))
    faults_.push_back(cat(where, ": the answer ", *fault));
  std::string key;
  for (const auto& message : prompt.messages) key += cat(message.role, "\n", message.text, "\n");
  const auto [first, is_new] = first_.try_emplace(std::move(key), First{where, sample.answer, sample.finish});
  if (is_new || (first->second.answer == sample.answer && first->second.finish == sample.finish)) return;
  const auto differ = std::ranges::mismatch(first->second.answer, sample.answer).in1 - first->second.answer.begin();
  faults_.push_back(cat(where, ": not the answer of ", first->second.where, "; they differ from byte ", differ, " on"));
}

}  // namespace glm53::cli
