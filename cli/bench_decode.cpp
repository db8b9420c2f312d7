// glm53ctl bench decode: the cells of a plan, one after the other, and what they came to.
#include "cli/bench_decode.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <latch>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/api_target.h"
#include "cli/bench_client.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/error.h"
#include "common/file.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr size_t kMostStreams = 1024;
constexpr size_t kPromptFileLimit = size_t{16} << 20;
constexpr int kVerificationFailed = 7;

void need(bool fine, std::string_view option, std::string_view what) {
  if (!fine) throw Error(Code::usage, cat(option, " must be ", what));
}

std::vector<size_t> stream_counts(const std::string& text) {
  std::vector<size_t> counts;
  for (const std::string& part : split(text, ',')) {
    const auto count = parse_int(trim(part));
    need(count && *count >= 1 && static_cast<size_t>(*count) <= kMostStreams, "--streams",
         cat("numbers from 1 to ", kMostStreams, ", such as 1,2,4,8"));
    counts.push_back(static_cast<size_t>(*count));
  }
  return counts;
}

std::vector<std::string> all_phases(const PromptSet& prompts) {
  std::vector<std::string> phases;
  for (const std::string_view phase : kPhases) {
    if (prompts.contains(phase)) phases.emplace_back(phase);
  }
  for (const auto& [phase, list] : prompts) {
    if (std::ranges::find(kPhases, phase) == std::end(kPhases)) phases.push_back(phase);
  }
  if (!prompts.contains(kMixed)) phases.emplace_back(kMixed);
  return phases;
}

std::string body_of(const DecodePrompt& prompt, const DecodePlan& plan, const std::string& mode,
                    const std::string& salt) {
  Json messages = Json::array();
  for (const auto& message : prompt.messages) messages.push_back({{"role", message.role}, {"content", message.text}});
  Json body = {{"messages", std::move(messages)},
               {"temperature", 0},
               {"max_tokens", plan.max_tokens},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}},
               {"cache_salt", salt},
               {"chat_template_kwargs", {{"enable_thinking", false}}}};
  if (mode != "auto") body["speculation"] = mode;
  return dump(body);
}

/// One plan against one server.
class DecodeBench {
 public:
  DecodeBench(const std::string& api, const std::string& key, const DecodePlan& plan, const PromptSet& prompts,
              Coherence& coherence)
      : api_(api), key_(key), plan_(plan), prompts_(prompts), coherence_(coherence) {}

  std::vector<DecodeResult> run(const std::function<void(const std::string&)>& say) {
    std::vector<DecodeResult> results;
    for (const std::string& phase : plan_.phases) {
      const std::vector<DecodePrompt> prompts = prompts_of_phase(prompts_, phase);
      for (const size_t streams : plan_.streams) {
        say(cat(phase, ", ", streams, streams == 1 ? " stream" : " streams"));
        for (DecodeResult& result : cells(phase, streams, prompts)) results.push_back(std::move(result));
      }
    }
    return results;
  }

 private:
  /// The cells of a class and a number of streams, one a mode of speculation. Their runs take turns, each time with
  /// another one first, so that what else the machine does falls on all of them.
  std::vector<DecodeResult> cells(const std::string& phase, size_t streams, const std::vector<DecodePrompt>& prompts) {
    const size_t modes = plan_.modes.size();
    std::vector<std::vector<DecodeRun>> runs(modes);
    const auto warm_up = static_cast<size_t>(plan_.warm_up), all = warm_up + static_cast<size_t>(plan_.runs);
    for (size_t turn = 0; turn < all; ++turn) {
      for (size_t i = 0; i < modes; ++i) {
        const size_t mode = (turn + i) % modes;
        // The mixed class goes on with each run, the others ask the same each time.
        const size_t first = phase == kMixed ? turn * (plan_.same ? 1 : streams) : 0;
        DecodeRun done = one_run({phase, plan_.modes[mode], streams}, prompts, first, turn);
        if (turn >= warm_up) runs[mode].push_back(std::move(done));
      }
    }
    std::vector<DecodeResult> results;
    for (size_t mode = 0; mode < modes; ++mode)
      results.push_back(summarise_decode({phase, plan_.modes[mode], streams}, std::move(runs[mode])));
    return results;
  }

  DecodeRun one_run(const DecodeCell& cell, const std::vector<DecodePrompt>& prompts, size_t first, size_t turn) {
    // A salt of its own for each run: no run finds its prompts in the prefix cache.
    const std::string salt =
        cat("bench ", Clock::now().time_since_epoch().count(), " ", cell.phase, " ", cell.streams, " ", turn);
    std::vector<BenchSample> samples(cell.streams);
    std::latch ready(static_cast<std::ptrdiff_t>(cell.streams));
    const auto start = Clock::now();
    {
      std::vector<std::jthread> clients;
      for (size_t s = 0; s < cell.streams; ++s) {
        const DecodePrompt& prompt = prompts[(first + (plan_.same ? 0 : s)) % prompts.size()];
        StreamedRequest request{api_, key_, body_of(prompt, plan_, cell.speculation, salt), plan_.timeout, {}};
        clients.emplace_back([&ready, &sample = samples[s], request = std::move(request), start] {
          ready.arrive_and_wait();
          sample = stream_chat(request, start);
        });
      }
    }
    for (size_t s = 0; plan_.coherence && s < samples.size(); ++s) {
      const DecodePrompt& prompt = prompts[(first + (plan_.same ? 0 : s)) % prompts.size()];
      const std::string where = cat(cell.phase, ", ", cell.streams, " streams, drafts ", cell.speculation, ", run ",
                                    turn + 1, ", stream ", s + 1);
      coherence_.take(prompt, where, samples[s]);
    }
    return decode_run(samples);
  }

  const std::string& api_;
  const std::string& key_;
  const DecodePlan& plan_;
  const PromptSet& prompts_;
  Coherence& coherence_;
};

std::string model_of(const std::string& api, const std::string& key) {
  HttpClient client(api, key);
  const HttpAnswer answer = client.request("GET", "/v1/models");
  if (answer.status == 401 || answer.status == 403) {
    throw Error(Code::denied, cat("the API answered ", answer.status, ": ", api_error_message(answer.body)),
                "name the file of API keys with --key-file");
  }
  if (answer.status != 200) throw Error(Code::unavailable, cat("/v1/models answered ", answer.status));
  const Json list = parse_json(answer.body).value("data", Json::array());
  if (!list.is_array() || list.empty() || !list[0].is_object())
    throw Error(Code::unavailable, "/v1/models names no model", "glm53ctl status");
  return list[0].value("id", std::string());
}

bool failed_everywhere(std::span<const DecodeResult> results) {
  return std::ranges::any_of(results, [](const DecodeResult& result) {
    return std::ranges::all_of(result.runs, [](const DecodeRun& run) { return run.each.empty(); });
  });
}

}  // namespace

DecodePlan checked_decode(const DecodeOptions& o, const PromptSet& prompts) {
  need(o.runs >= 1 && o.runs <= 1000, "--runs", "between 1 and 1000");
  need(o.warm_up >= 0 && o.warm_up <= 1000, "--warm-up", "between 0 and 1000");
  need(o.max_tokens >= 2, "--max-tokens", "at least 2");
  need(o.speculation == "auto" || o.speculation == "off", "--speculation", "auto or off");
  need(!o.compare_off || o.speculation == "auto", "--compare-off", "without --speculation off");
  DecodePlan plan;
  plan.phases = o.phases.empty() ? all_phases(prompts) : o.phases;
  for (const std::string& phase : plan.phases) prompts_of_phase(prompts, phase);
  plan.streams = stream_counts(o.streams);
  plan.modes = o.compare_off ? std::vector<std::string>{"auto", "off"} : std::vector<std::string>{o.speculation};
  plan.runs = o.runs;
  plan.warm_up = o.warm_up;
  plan.max_tokens = o.max_tokens;
  plan.same = o.same;
  plan.coherence = !o.skip_coherence;
  const auto timeout = parse_duration(o.timeout);
  need(timeout && timeout->count() >= 1, "--timeout", "a time such as 30s or 5m");
  plan.timeout = std::chrono::duration<double>(*timeout).count();
  return plan;
}

std::vector<DecodeResult> measure_decode(const std::string& api, const std::string& key, const DecodePlan& plan,
                                         const PromptSet& prompts, Coherence& coherence,
                                         const std::function<void(const std::string&)>& say) {
  return DecodeBench(api, key, plan, prompts, coherence).run(say);
}

int run_bench_decode(const GlobalOptions& global, const DecodeOptions& options) {
  const ApiTarget target = resolve_api(global, {options.api, options.key_file});
  const std::string key = target.key_file.empty() ? std::string() : read_api_keys(target.key_file).front();
  const std::string model = model_of(target.url, key);
  const PromptSet prompts = options.prompts.empty()
                                ? builtin_prompts(model)
                                : prompts_of(parse_json(read_file(options.prompts, kPromptFileLimit)));
  const DecodePlan plan = checked_decode(options, prompts);
  Coherence coherence;
  const bool talk = !global.json && stdout_is_terminal();
  const auto say = [talk](const std::string& what) {
    if (talk) print_line(cat("… ", what));
  };
  const std::vector<DecodeResult> results = measure_decode(target.url, key, plan, prompts, coherence, say);
  const Json report = decode_json(results, plan, coherence, model);
  if (!options.out.empty()) write_file(options.out, dump(report) + "\n");
  if (global.json) {
    print_line(dump(report));
  } else {
    print(render_decode(results, plan, coherence));
  }
  if (!coherence.faults().empty()) return kVerificationFailed;
  return failed_everywhere(results) ? 1 : 0;
}

}  // namespace glm53::cli
