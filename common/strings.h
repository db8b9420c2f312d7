// Small text helpers shared by every program.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace glm53 {

namespace detail {
inline void append(std::string& out, std::string_view s) {
  out += s;
}
inline void append(std::string& out, char c) {
  out += c;
}
inline void append(std::string& out, const char* s) {
  out += s;
}
// A template, so that a pointer does not become a bool.
template <std::same_as<bool> T>
void append(std::string& out, T b) {
  out += b ? "true" : "false";
}
template <std::integral T>
  requires(!std::same_as<T, char> && !std::same_as<T, bool>)
void append(std::string& out, T v) {
  out += std::to_string(v);
}
void append(std::string& out, double v);
}  // namespace detail

/// Concatenates strings, characters, integers and floating-point numbers (shortest form).
template <class... A>
std::string cat(const A&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

std::vector<std::string> split(std::string_view text, char separator);
std::string join(std::span<const std::string> parts, std::string_view separator);
std::string_view trim(std::string_view text);

/// Whole-string numbers, independent of the locale; nullopt when anything is left over or out of range.
std::optional<int64_t> parse_int(std::string_view text);
std::optional<double> parse_double(std::string_view text);
/// "64", "512KiB", "14GiB", "1.5GB".
std::optional<int64_t> parse_bytes(std::string_view text);
/// "250ms", "30s", "2m", "1h".
std::optional<std::chrono::milliseconds> parse_duration(std::string_view text);
/// "13.4 GiB".
std::string human_bytes(int64_t bytes);

/// Candidate with the smallest edit distance to `text` (ties: first), if that is at most a third of its length plus 1.
std::optional<std::string> nearest(std::string_view text, std::span<const std::string> candidates);

/// True when the bytes are well-formed UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
bool valid_utf8(std::string_view bytes);

/// Equality in time that depends only on the lengths; for keys and tokens.
bool equal_constant_time(std::string_view a, std::string_view b);

}  // namespace glm53
