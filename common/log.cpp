#include "common/log.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::log {

namespace {

constexpr std::string_view kHidden = "[redacted]";

/// The process's one log. Locked: secrets may be added while other threads write.
struct State {
  std::mutex mutex;
  std::vector<std::string> secrets;
  std::string tag;
  std::shared_ptr<spdlog::logger> logger;
};

State& state() {
  static State instance;
  return instance;
}

std::shared_ptr<spdlog::logger> make_logger(Level level) {
  auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  auto logger = std::make_shared<spdlog::logger>("glm53", std::move(sink));
  logger->set_formatter(
      std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%S.%eZ %v", spdlog::pattern_time_type::utc));
  static constexpr spdlog::level::level_enum levels[] = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                                         spdlog::level::err};
  logger->set_level(levels[static_cast<size_t>(level)]);
  logger->flush_on(spdlog::level::debug);
  return logger;
}

bool is_token_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("-._~+/=").find(c) != std::string_view::npos;
}
bool is_word_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_value_char(char c) {
  return static_cast<unsigned char>(c) > ' ' && std::string_view("&\"'<>)").find(c) == std::string_view::npos;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

void replace_all(std::string& line, const std::string& secret) {
  for (size_t at = line.find(secret); at != std::string::npos; at = line.find(secret, at + kHidden.size())) {
    line.replace(at, secret.size(), kHidden);
  }
}

size_t run_length(std::string_view line, size_t from, bool (*accepts)(char)) {
  size_t end = from;
  while (end < line.size() && accepts(line[end])) ++end;
  return end - from;
}

/// A marker in lower case, what follows it, and how many such characters make it a secret.
struct Pattern {
  std::string_view marker;
  bool (*accepts)(char);
  size_t least;
};

constexpr Pattern kPatterns[] = {
    {"bearer ", is_token_char, 1},      {"basic ", is_token_char, 16},    {"hf_", is_word_char, 8},
    {"ghp_", is_word_char, 8},          {"gho_", is_word_char, 8},        {"ghs_", is_word_char, 8},
    {"github_pat_", is_word_char, 8},   {"signature=", is_value_char, 1}, {"policy=", is_value_char, 1},
    {"key-pair-id=", is_value_char, 1}, {"token=", is_value_char, 1},
};

/// Length of "x-amz-NAME=" at `at` of the lower-case line; 0 when there is none.
size_t amz_marker(std::string_view low, size_t at) {
  static constexpr std::string_view prefix = "x-amz-";
  if (low.substr(at, prefix.size()) != prefix) return 0;
  size_t end = at + prefix.size();
  while (end < low.size() && (is_word_char(low[end]) || low[end] == '-')) ++end;
  return end < low.size() && low[end] == '=' ? end + 1 - at : 0;
}

/// Length of the marker and of the secret after it at `at`; {0, 0} when there is none.
std::pair<size_t, size_t> secret_at(std::string_view line, std::string_view low, size_t at) {
  if (const size_t marker = amz_marker(low, at); marker != 0) {
    return {marker, run_length(line, at + marker, is_value_char)};
  }
  for (const auto& p : kPatterns) {
    if (low.substr(at, p.marker.size()) != p.marker) continue;
    const size_t length = run_length(line, at + p.marker.size(), p.accepts);
    if (length >= p.least) return {p.marker.size(), length};
  }
  return {0, 0};
}

std::string hide_patterns(const std::string& line) {
  const std::string low = lower(line);
  std::string out;
  size_t done = 0;
  for (size_t at = 0; at < line.size(); ++at) {
    if (std::string_view("bhgspkxt").find(low[at]) == std::string_view::npos) continue;
    if (at > 0 && is_word_char(line[at - 1]) && low[at] != 't') continue;
    const auto [marker, length] = secret_at(line, low, at);
    if (length == 0) continue;
    out.append(line, done, at + marker - done);
    out += kHidden;
    done = at + marker + length;
    at = done - 1;
  }
  if (done == 0) return line;
  out.append(line, done);
  return out;
}

/// One line, whatever the text holds: control characters are escaped.
std::string one_line(std::string_view text) {
  static constexpr std::string_view digits = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if ((byte < 0x20 && c != '\t') || byte == 0x7F) {
      out += "\\x";
      out += digits[byte >> 4];
      out += digits[byte & 15];
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

void init(std::string_view tag, Level level) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.tag = tag;
  s.logger = make_logger(level);
}

Level parse_level(std::string_view text) {
  if (text == "debug") return Level::debug;
  if (text == "info") return Level::info;
  if (text == "warn") return Level::warn;
  if (text == "error") return Level::error;
  throw Error(Code::config, cat("unknown log level '", text, "'"), "one of debug, info, warn, error");
}

void add_secret(std::string secret) {
  if (secret.empty()) return;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (std::find(s.secrets.begin(), s.secrets.end(), secret) == s.secrets.end()) s.secrets.push_back(std::move(secret));
  // Longest first, so that a secret that contains another one goes as a whole.
  std::stable_sort(s.secrets.begin(), s.secrets.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
}

std::string redact(std::string line) {
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    for (const auto& secret : s.secrets) replace_all(line, secret);
  }
  return hide_patterns(line);
}

void write(Level level, std::string_view text) {
  static constexpr std::string_view names[] = {"debug", "info ", "warn ", "error"};
  static constexpr spdlog::level::level_enum levels[] = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                                         spdlog::level::err};
  std::shared_ptr<spdlog::logger> logger;
  std::string tag;
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (!s.logger) s.logger = make_logger(Level::info);
    logger = s.logger;
    tag = s.tag;
  }
  const auto index = static_cast<size_t>(level);
  if (!logger->should_log(levels[index])) return;
  const std::string line = cat(names[index], " ", tag, tag.empty() ? "" : ": ", one_line(redact(std::string(text))));
  logger->log(levels[index], spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace glm53::log
