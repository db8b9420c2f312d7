#include "common/strings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace glm53 {

namespace {

bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) { return lower(x) == lower(y); });
}

struct Unit {
  std::string_view name;
  int64_t factor;
};

/// "1.5GB" as 1.5 times the factor of its unit; nullopt for an unknown unit, a sign, a fraction of the base unit or
/// overflow.
std::optional<int64_t> parse_quantity(std::string_view text, std::span<const Unit> units) {
  text = trim(text);
  const size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view number = text.substr(0, end);
  const std::string_view suffix = trim(text.substr(end));
  const auto unit =
      std::find_if(units.begin(), units.end(), [&](const Unit& u) { return equal_ignoring_case(u.name, suffix); });
  if (number.empty() || unit == units.end()) return std::nullopt;
  if (number.find('.') == std::string_view::npos) {
    const auto whole = parse_int(number);
    int64_t product = 0;
    if (!whole || __builtin_mul_overflow(*whole, unit->factor, &product)) return std::nullopt;
    return product;
  }
  const auto fraction = parse_double(number);
  if (!fraction || unit->factor == 1) return std::nullopt;
  const double product = *fraction * static_cast<double>(unit->factor);
  if (product >= 9.2e18) return std::nullopt;
  return std::llround(product);
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

namespace detail {

void append(std::string& out, double v) {
  std::array<char, 32> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), v);
  if (error == std::errc()) out.append(buffer.data(), end);
}

}  // namespace detail

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    if (end == std::string_view::npos) break;
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.emplace_back(text.substr(begin));
  return parts;
}

std::string join(std::span<const std::string> parts, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i != 0) out += separator;
    out += parts[i];
  }
  return out;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::optional<int64_t> parse_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<double> parse_double(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  static constexpr int64_t kib = 1024, kb = 1000;
  static constexpr std::array<Unit, 14> units = {{{"", 1},
                                                  {"B", 1},
                                                  {"KiB", kib},
                                                  {"MiB", kib * kib},
                                                  {"GiB", kib * kib * kib},
                                                  {"TiB", kib * kib * kib * kib},
                                                  {"KB", kb},
                                                  {"MB", kb * kb},
                                                  {"GB", kb * kb * kb},
                                                  {"TB", kb * kb * kb * kb},
                                                  {"Ki", kib},
                                                  {"Mi", kib * kib},
                                                  {"Gi", kib * kib * kib},
                                                  {"Ti", kib * kib * kib * kib}}};
  return parse_quantity(text, units);
}

std::optional<std::chrono::milliseconds> parse_duration(std::string_view text) {
  static constexpr std::array<Unit, 4> units = {{{"ms", 1}, {"s", 1000}, {"m", 60 * 1000}, {"h", 60 * 60 * 1000}}};
  if (trim(text) == "0") return std::chrono::milliseconds(0);
  const auto ms = parse_quantity(text, units);
  // 100 years: sums of time points and durations stay far from overflow.
  if (!ms || *ms > int64_t{100} * 366 * 24 * 60 * 60 * 1000) return std::nullopt;
  return std::chrono::milliseconds(*ms);
}

std::string human_bytes(int64_t bytes) {
  static constexpr std::array<const char*, 6> units = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = std::abs(static_cast<double>(bytes));
  const char* sign = bytes < 0 ? "-" : "";
  if (value < 1024) return cat(bytes, " B");
  size_t unit = 0;
  value /= 1024;
  while (value >= 1023.95 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%s%.1f %s", sign, value, units[unit]);
  return buffer.data();
}

std::optional<std::string> nearest(std::string_view text, std::span<const std::string> candidates) {
  if (text.size() > 256) return std::nullopt;
  const std::string* best = nullptr;
  size_t best_distance = text.size() / 3 + 2;
  for (const auto& candidate : candidates) {
    if (candidate.size() > text.size() + best_distance) continue;
    const size_t distance = edit_distance(text, candidate);
    if (distance < best_distance) {
      best = &candidate;
      best_distance = distance;
    }
  }
  if (best == nullptr) return std::nullopt;
  return *best;
}

bool valid_utf8(std::string_view bytes) {
  size_t i = 0;
  while (i < bytes.size()) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    size_t more = 0;
    uint32_t point = 0, least = 0;
    if ((lead & 0xE0) == 0xC0) {
      more = 1, point = lead & 0x1Fu, least = 0x80;
    } else if ((lead & 0xF0) == 0xE0) {
      more = 2, point = lead & 0x0Fu, least = 0x800;
    } else if ((lead & 0xF8) == 0xF0) {
      more = 3, point = lead & 0x07u, least = 0x10000;
    } else {
      return false;
    }
    if (bytes.size() - i <= more) return false;
    for (size_t k = 1; k <= more; ++k) {
      const auto next = static_cast<unsigned char>(bytes[i + k]);
      if ((next & 0xC0) != 0x80) return false;
      point = (point << 6) | (next & 0x3Fu);
    }
    if (point < least || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return false;
    i += more + 1;
  }
  return true;
}

bool equal_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile: the compiler may not turn the loop into an early exit.
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference =
        static_cast<unsigned char>(difference | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i])));
  }
  return difference == 0;
}

}  // namespace glm53
