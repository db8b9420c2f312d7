// glm53ctl smoke: one streamed chat through the public API, judged.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "cli/api_target.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr int kVerificationFailed = 7;

/// What one streamed chat gave.
struct Answer {
  std::string reasoning, content, finish, error;
  int64_t tokens = 0;
  Clock::time_point started, first, last;
};

std::string string_member(const Json& json, const char* member) {
  const auto at = json.find(member);
  return at != json.end() && at->is_string() ? at->get<std::string>() : std::string();
}

void take_event(std::string_view data, Answer& answer, bool show) {
  if (data == "[DONE]") return;
  const Json event = parse_json(data);
  if (event.contains("error")) {
    answer.error = event["error"].is_object() ? string_member(event["error"], "message") : event["error"].dump();
    return;
  }
  if (event.contains("usage") && event["usage"].is_object()) {
    answer.tokens = event["usage"].value("completion_tokens", int64_t{0});
  }
  if (!event.contains("choices") || !event["choices"].is_array() || event["choices"].empty()) return;
  const Json& choice = event["choices"][0];
  answer.finish = choice.contains("finish_reason") ? string_member(choice, "finish_reason") : answer.finish;
  if (!choice.contains("delta") || !choice["delta"].is_object()) return;
  const std::string reasoning = string_member(choice["delta"], "reasoning_content");
  const std::string content = string_member(choice["delta"], "content");
  if (reasoning.empty() && content.empty()) return;
  answer.last = Clock::now();
  if (answer.first == Clock::time_point{}) answer.first = answer.last;
  answer.reasoning += reasoning;
  answer.content += content;
  if (show) print(cat(paint(reasoning, Colour::dim, colours_wanted()), content));
}

Answer chat(const std::string& api, const std::string& key, const SmokeOptions& options, bool show) {
  HttpClient http(api, key);
  http.set_timeout(5s, 120s);
  const Json body = {{"messages", Json::array({{{"role", "user"}, {"content", options.prompt}}})},
                     {"stream", true},
                     {"stream_options", {{"include_usage", true}}},
                     {"temperature", 0},
                     {"max_tokens", options.max_tokens},
                     {"chat_template_kwargs", {{"enable_thinking", false}}}};
  Answer answer;
  answer.started = Clock::now();
  SseParser parser([&](std::string_view, std::string_view data) { take_event(data, answer, show); });
  std::string raw;
  const HttpAnswer result = http.stream("POST", "/v1/chat/completions", dump(body), [&](std::string_view bytes) {
    if (raw.size() < 4096) raw += bytes.substr(0, 4096);
    parser.feed(bytes);
    return true;
  });
  if (result.status != 200) {
    const std::string& text = result.body.empty() ? raw : result.body;
    throw Error(result.status == 401 ? Code::denied : Code::unavailable,
                cat("the API answered ", result.status, ": ", api_error_message(text)),
                result.status == 401 ? "name the API key's file with --key-file" : "glm53ctl status");
  }
  return answer;
}

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

std::string two_decimals(double value) {
  const auto hundredths = std::llround(value * 100);
  return cat(hundredths / 100, ".", hundredths % 100 < 10 ? "0" : "", hundredths % 100);
}

}  // namespace

std::optional<std::string> degenerate(std::string_view answer) {
  const std::string_view text = trim(answer);
  if (text.empty()) return "the answer is empty";
  if (!valid_utf8(text)) return "the answer is not UTF-8";
  std::vector<std::string> words;
  std::string spaced(text);
  std::ranges::replace(spaced, '\n', ' ');
  for (auto& word : split(spaced, ' ')) {
    if (!word.empty()) words.push_back(std::move(word));
  }
  size_t broken = 0;
  for (size_t at = text.find("\xEF\xBF\xBD"); at != std::string_view::npos; at = text.find("\xEF\xBF\xBD", at + 3))
    ++broken;
  if (broken * 20 > text.size()) return "the answer is full of broken characters";
  std::map<std::string, size_t> counts;
  size_t most = 0, longest = 0;
  for (const auto& word : words) {
    most = std::max(most, ++counts[word]);
    longest = std::max(longest, word.size());
  }
  if (words.size() >= 12 && most * 2 > words.size()) return "the answer repeats one word";
  if (words.size() >= 24 && counts.size() * 8 < words.size()) return "the answer repeats a few words";
  if (longest > 400) return "the answer is one long run without spaces";
  return std::nullopt;
}

int run_smoke(const GlobalOptions& global, const SmokeOptions& given) {
  if (given.max_tokens < 1) throw Error(Code::usage, "--max-tokens must be at least 1");
  const ApiTarget target = resolve_api(global, {given.api, given.key_file});
  const std::string key = target.key_file.empty() ? std::string() : read_api_keys(target.key_file).front();
  const bool show = !global.json;
  if (show) print_line(cat(paint("> ", Colour::bold, colours_wanted()), given.prompt));
  const Answer answer = chat(target.url, key, given, show);
  std::optional<std::string> fault = degenerate(answer.content.empty() ? answer.reasoning : answer.content);
  if (!answer.error.empty()) fault = cat("the stream ended with an error: ", answer.error);
  if (answer.finish.empty() && !fault) fault = "the stream ended without a finish reason";

  const double first = answer.first == Clock::time_point{} ? 0 : seconds(answer.first - answer.started);
  const double rest = seconds(answer.last - answer.first);
  const double rate = rest > 0 && answer.tokens > 1 ? static_cast<double>(answer.tokens - 1) / rest : 0;
  if (global.json) {
    print_line(dump({{"ok", !fault},
                     {"fault", fault ? Json(*fault) : Json(nullptr)},
                     {"answer", answer.content},
                     {"reasoning", answer.reasoning},
                     {"finish_reason", answer.finish},
                     {"tokens", answer.tokens},
                     {"first_token_s", first},
                     {"tokens_per_second", rate}}));
  } else {
    print_line(cat("\n[", answer.tokens, " tokens, first after ", two_decimals(first), " s, ", two_decimals(rate),
                   " tokens/s, finish: ", answer.finish.empty() ? "none" : answer.finish, "]"));
    if (fault) print_line(cat("not good: ", *fault));
  }
  return fault ? kVerificationFailed : 0;
}

}  // namespace glm53::cli
