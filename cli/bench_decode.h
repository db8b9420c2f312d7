// `glm53ctl bench decode`: how fast answers are written, by class of prompt and number of streams, with and without
// drafts, and whether they are answers. What is measured where: docs/performance.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/bench_prompts.h"
#include "cli/bench_stats.h"

namespace glm53::cli {

/// The command line of bench decode.
struct DecodeOptions {
  std::string api, key_file;        ///< "" = asked from the agent
  std::vector<std::string> phases;  ///< classes of prompts; empty: all there are
  std::string streams = "1,2,4,8";
  int runs = 5;
  int warm_up = 1;  ///< runs before them that do not count
  int max_tokens = 400;
  bool same = false;  ///< all streams ask the same
  std::string prompts, out;
  std::string speculation = "auto";  ///< or "off"
  bool compare_off = false;          ///< both, taking turns
  bool skip_coherence = false;
  std::string timeout = "600s";
};

/// The options checked.
struct DecodePlan {
  std::vector<std::string> phases;
  std::vector<size_t> streams;
  std::vector<std::string> modes;  ///< of speculation
  int runs = 0, warm_up = 0, max_tokens = 0;
  bool same = false, coherence = true;
  double timeout = 0;
};
/// Throws Error(usage) naming the option.
DecodePlan checked_decode(const DecodeOptions& options, const PromptSet& prompts);

/// What one cell of the table is.
struct DecodeCell {
  std::string phase, speculation;
  size_t streams = 0;
};

/// One run of a cell: all its streams at once. Rates count from the first to the last token, without reading prompts.
struct DecodeRun {
  std::vector<double> each;   ///< tokens/s of each stream
  double all = 0;             ///< tokens/s of all together, from the first token of any to the last of any
  double first_token = 0;     ///< seconds, mean of the streams
  double tokens_a_step = 0;   ///< 1 without drafts
  int64_t output_tokens = 0;  ///< all of them
  int64_t accepted = 0, rejected = 0;
  size_t failed = 0;
  std::string error;  ///< of one that failed
};
/// The samples of a run, one a stream. Streams that failed, or whose answer is one token, count in nothing but
/// `failed`.
DecodeRun decode_run(std::span<const BenchSample> samples);

/// Lowest, median and highest of the runs.
struct Middle {
  double median = 0, low = 0, high = 0;
};
Middle middle_of(std::vector<double> values);

struct DecodeResult {
  DecodeCell cell;
  std::vector<DecodeRun> runs;
  Middle each, all, first_token, tokens_a_step;  ///< each: of the runs' means
  double accepted_share = 0;                     ///< of all drafts
};
DecodeResult summarise_decode(DecodeCell cell, std::vector<DecodeRun> runs);

/// Holds answers to their prompts, and the answers to one prompt to each other.
class Coherence {
 public:
  /// Of a greedy request.
  void take(const DecodePrompt& prompt, const std::string& where, const BenchSample& sample);
  size_t answers() const { return answers_; }
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  struct First {
    std::string where, answer, finish;
  };
  std::map<std::string, First> first_;  // by the messages of the prompt
  std::vector<std::string> faults_;
  size_t answers_ = 0;
};

/// Runs the plan against the API at this address; `say` is told what comes next. Requests that fail are part of the
/// result.
std::vector<DecodeResult> measure_decode(const std::string& api, const std::string& key, const DecodePlan& plan,
                                         const PromptSet& prompts, Coherence& coherence,
                                         const std::function<void(const std::string&)>& say);

std::string render_decode(std::span<const DecodeResult> results, const DecodePlan& plan, const Coherence& coherence);
nlohmann::ordered_json decode_json(std::span<const DecodeResult> results, const DecodePlan& plan,
                                   const Coherence& coherence, const std::string& model);

}  // namespace glm53::cli
