// Logging facade; spdlog stays in log.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace glm53::log {

enum class Level { debug, info, warn, error };

/// Starts logging to stderr, one line each: "2026-11-30T12:00:00.123Z info  rank0: text". `tag` names the process.
void init(std::string_view tag, Level level);
Level parse_level(std::string_view text);  ///< throws Error(config)
/// Text that must never be printed (keys, tokens); every line is filtered for it and for "Bearer …", "hf_…" patterns.
void add_secret(std::string secret);
/// The filter itself, for lines of child processes.
std::string redact(std::string line);

void write(Level level, std::string_view text);
inline void debug(std::string_view text) {
  write(Level::debug, text);
}
inline void info(std::string_view text) {
  write(Level::info, text);
}
inline void warn(std::string_view text) {
  write(Level::warn, text);
}
inline void error(std::string_view text) {
  write(Level::error, text);
}

}  // namespace glm53::log
