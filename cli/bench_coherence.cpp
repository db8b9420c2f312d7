// Is an answer of `glm53ctl bench decode` one? A drafter that breaks the text must not win a comparison of speed.
#include <algorithm>
#include <map>

#include <nlohmann/json.hpp>

#include "cli/bench_prompts.h"
#include "cli/commands.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

/// One word this often in succession is no text.
constexpr size_t kLongestRun = 16;
/// Share of the words that an answer must have in common with the text that it should repeat.
constexpr double kAlike = 0.8;

std::vector<std::string> words_of(std::string_view text) {
  std::string spaced(text);
  std::ranges::replace(spaced, '\n', ' ');
  std::vector<std::string> words;
  for (auto& word : split(spaced, ' ')) {
    if (!word.empty()) words.push_back(std::move(word));
  }
  return words;
}

std::optional<std::string> stuck(std::string_view text) {
  size_t run = 0;
  std::string last;
  for (auto& word : words_of(text)) {
    run = word == last ? run + 1 : 1;
    if (run > kLongestRun) return cat("'", word.substr(0, 40), "' more than ", kLongestRun, " times in succession");
    last = std::move(word);
  }
  return std::nullopt;
}

/// Runs of digits, in order.
std::vector<std::string> numbers_in(std::string_view text) {
  std::vector<std::string> numbers;
  bool inside = false;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (digit && !inside) numbers.emplace_back();
    if (digit) numbers.back() += c;
    inside = digit;
  }
  return numbers;
}

std::optional<std::string> miscounted(const DecodePrompt::Range& range, std::string_view answer, bool whole) {
  const std::vector<std::string> numbers = numbers_in(answer);
  int64_t wanted = range.from;
  for (size_t i = 0; i < numbers.size(); ++i, ++wanted) {
    const std::string want = cat(wanted);
    // The end of the budget may have cut the last one.
    const bool cut = !whole && i + 1 == numbers.size() && want.starts_with(numbers[i]);
    if (wanted > range.to || (numbers[i] != want && !cut))
      return cat("counts ", numbers[i].substr(0, 20),
                 wanted > range.to ? " behind the last number" : cat(" instead of ", want));
  }
  if (numbers.empty()) return "counts nothing";
  if (whole && wanted <= range.to) return cat("stops counting before ", wanted);
  return std::nullopt;
}

/// Without the fence that models put around code.
std::string_view unfenced(std::string_view text) {
  text = trim(text);
  if (!text.starts_with("```")) return text;
  const size_t line = text.find('\n');
  if (line == std::string_view::npos) return text;
  text.remove_prefix(line + 1);
  if (const size_t end = text.rfind("```"); end != std::string_view::npos) text = text.substr(0, end);
  return trim(text);
}

std::optional<std::string> unlike(std::string_view wanted, std::string_view answer, bool whole) {
  std::map<std::string, size_t> left;
  const std::vector<std::string> wanted_words = words_of(wanted), words = words_of(answer);
  for (const auto& word : wanted_words) ++left[word];
  size_t common = 0;
  for (const auto& word : words) {
    const auto found = left.find(word);
    if (found == left.end() || found->second == 0) continue;
    --found->second;
    ++common;
  }
  const size_t all = whole ? wanted_words.size() : std::min(words.size(), wanted_words.size());
  if (static_cast<double>(common) >= kAlike * static_cast<double>(all)) return std::nullopt;
  return cat("has only ", common, " of ", all, " words of the text it should repeat");
}

}  // namespace

std::optional<std::string> incoherent(const DecodePrompt& prompt, std::string_view answer, bool whole) {
  if (auto fault = degenerate(answer)) return fault;
  if (auto fault = stuck(answer)) return fault;
  if (prompt.count) {
    if (auto fault = miscounted(*prompt.count, answer, whole)) return fault;
  }
  if (prompt.json && whole) {
    if (!nlohmann::json::accept(unfenced(answer))) return "is no JSON";
  }
  if (!prompt.contains.empty() && whole && answer.find(prompt.contains) == std::string_view::npos)
    return cat("does not contain '", prompt.contains, "'");
  if (!prompt.like.empty()) return unlike(prompt.like, answer, whole);
  return std::nullopt;
}

}  // namespace glm53::cli
