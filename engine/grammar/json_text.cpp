// JSON text without a schema, numbers between bounds, formats of strings.
#include "engine/text/json_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"
#include "engine/grammar/json_schema.h"
#include "engine/grammar/regex.h"

namespace glm53::grammar {

using Id = Builder::Id;
using Json = nlohmann::ordered_json;

namespace {

constexpr int64_t kMost = 999'999'999'999'999'999;  // 18 digits
constexpr int kFraction = 6;                        // digits that follow freely behind a bounded number's point

Id digits(Builder& b, int64_t min, int64_t max) {
  return b.repeat(b.range('0', '9'), min, max);
}
Id digit_range(Builder& b, int low, int high) {
  if (low > high) return b.nothing();
  return b.range(static_cast<uint8_t>(low), static_cast<uint8_t>(high));
}

/// Numbers of the same length from `low` on, digit by digit; with `up` false: up to `low`.
Id bound(Builder& b, const std::string& low, size_t at, bool up) {
  if (at == low.size()) return b.empty();
  const int d = low[at];
  const auto rest = static_cast<int64_t>(low.size() - at - 1);
  const Id other = up ? digit_range(b, d + 1, '9') : digit_range(b, '0', d - 1);
  return b.alt({b.seq({digit_range(b, d, d), bound(b, low, at + 1, up)}), b.seq({other, digits(b, rest, rest)})});
}

Id same_length(Builder& b, const std::string& low, const std::string& high) {
  size_t same = 0;
  while (same < low.size() && low[same] == high[same]) ++same;
  const Id head = b.text(low.substr(0, same));
  if (same == low.size()) return head;
  const auto rest = static_cast<int64_t>(low.size() - same - 1);
  return b.seq({head, b.alt({b.seq({digit_range(b, low[same], low[same]), bound(b, low, same + 1, true)}),
                             b.seq({digit_range(b, low[same] + 1, high[same] - 1), digits(b, rest, rest)}),
                             b.seq({digit_range(b, high[same], high[same]), bound(b, high, same + 1, false)})})});
}

/// 0 <= low <= high.
Id natural_range(Builder& b, int64_t low, int64_t high) {
  std::vector<Id> parts;
  int64_t first = 0, last = 9;
  while (first <= high) {
    if (last >= low) parts.push_back(same_length(b, cat(std::max(first, low)), cat(std::min(last, high))));
    if (last == kMost) break;
    first = last + 1;
    last = last * 10 + 9;
  }
  return b.alt(std::move(parts));
}

struct Decimal {
  int64_t whole = 0;
  std::string fraction;  ///< without zeros at the end
};

Decimal decimal_of(double value) {
  std::array<char, 400> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed).ptr;
  const std::string s(text.data(), end);
  const size_t point = s.find('.');
  Decimal out;
  out.whole = parse_int(s.substr(0, point)).value_or(0);
  if (point != std::string::npos) out.fraction = s.substr(point + 1);
  while (out.fraction.ends_with('0')) out.fraction.pop_back();
  return out;
}

Id free_fraction(Builder& b) {
  return b.optional(b.seq({b.text("."), digits(b, 1, kFraction)}));
}

/// Digits behind the point, `at` of them those of `f` already, so that the number is at least (at most) 0.f.
Id fraction(Builder& b, const std::string& f, size_t at, bool up, bool excluded) {
  const Id zeros = b.repeat(b.text("0"), 0, kFraction);
  if (at == f.size()) {
    if (!up) return excluded ? b.nothing() : zeros;
    if (!excluded) return digits(b, 0, kFraction);
    return b.seq({zeros, b.range('1', '9'), digits(b, 0, kFraction)});
  }
  const Id other = up ? digit_range(b, f[at] + 1, '9') : digit_range(b, '0', f[at] - 1);
  std::vector<Id> parts{b.seq({other, digits(b, 0, kFraction)}),
                        b.seq({digit_range(b, f[at], f[at]), fraction(b, f, at + 1, up, excluded)})};
  if (!up && at > 0) parts.push_back(b.empty());
  return b.alt(std::move(parts));
}

Id at_least(Builder& b, const Decimal& low, bool excluded) {
  std::vector<Id> parts;
  if (low.whole < kMost) parts.push_back(b.seq({natural_range(b, low.whole + 1, kMost), free_fraction(b)}));
  std::vector<Id> tails;
  if (low.fraction.empty() && !excluded)
    tails.push_back(free_fraction(b));
  else
    tails.push_back(b.seq({b.text("."), fraction(b, low.fraction, 0, true, excluded)}));
  parts.push_back(b.seq({b.text(cat(low.whole)), b.alt(std::move(tails))}));
  return b.alt(std::move(parts));
}

Id at_most(Builder& b, const Decimal& high, bool excluded) {
  std::vector<Id> parts;
  if (high.whole > 0) parts.push_back(b.seq({natural_range(b, 0, high.whole - 1), free_fraction(b)}));
  std::vector<Id> tails;
  if (!high.fraction.empty() || !excluded) tails.push_back(b.empty());
  if (!high.fraction.empty())
    tails.push_back(b.seq({b.text("."), fraction(b, high.fraction, 0, false, excluded)}));
  else if (!excluded)
    tails.push_back(b.seq({b.text("."), b.repeat(b.text("0"), 1, kFraction)}));
  parts.push_back(b.seq({b.text(cat(high.whole)), b.alt(std::move(tails))}));
  return b.alt(std::move(parts));
}

/// Numbers without a sign; `min` >= 0.
Id magnitudes(Builder& b, const NumberBounds& bounds) {
  const Id low = at_least(b, decimal_of(bounds.min.value_or(0)), bounds.min && bounds.min_excluded);
  if (!bounds.max) return low;
  return b.both(low, at_most(b, decimal_of(*bounds.max), bounds.max_excluded));
}

}  // namespace

JsonText::JsonText(Builder& builder)
    : b_(builder),
      space_(b_.rule("space")),
      string_(b_.rule("string")),
      any_(b_.rule("value")),
      object_(b_.rule("object")),
      array_(b_.rule("array")) {
  ByteSet blank;
  blank.set(' ');
  blank.set('\t');
  b_.define(space_, b_.alt({b_.empty(), b_.text(" "), b_.seq({b_.text("\n"), b_.repeat(b_.set(blank), 0, 24)})}));
  b_.define(string_, b_.seq({b_.text("\""), b_.repeat(any_json_character(b_), 0, Builder::kUnbounded), b_.text("\"")}));
  b_.define(any_, b_.alt({object(), array(), string(), number(), b_.literals({"true", "false", "null"})}));
  const auto list = [&](Id item) {
    return b_.seq(
        {space(), b_.optional(b_.seq({item, b_.repeat(b_.seq({comma(), item}), 0, Builder::kUnbounded)})), space()});
  };
  b_.define(object_, b_.seq({b_.text("{"), list(b_.seq({string(), colon(), any()})), b_.text("}")}));
  b_.define(array_, b_.seq({b_.text("["), list(any()), b_.text("]")}));
}

Id JsonText::colon() {
  return b_.seq({b_.text(":"), b_.optional(b_.text(" "))});
}
Id JsonText::comma() {
  return b_.seq({b_.text(","), space()});
}

Id JsonText::number() {
  ByteSet e, sign;
  e.set('e').set('E');
  sign.set('+').set('-');
  return b_.seq({b_.optional(b_.text("-")), b_.alt({b_.text("0"), b_.seq({b_.range('1', '9'), digits(b_, 0, 14)})}),
                 b_.optional(b_.seq({b_.text("."), digits(b_, 1, 15)})),
                 b_.optional(b_.seq({b_.set(e), b_.optional(b_.set(sign)), digits(b_, 1, 2)}))});
}

Id JsonText::integer() {
  return b_.seq({b_.optional(b_.text("-")), b_.alt({b_.text("0"), b_.seq({b_.range('1', '9'), digits(b_, 0, 17)})})});
}

Id JsonText::constant(const Json& value, int depth) {
  b_.budget().spend(1);
  if (!value.is_structured()) return b_.text(text::python_json(value));
  if (value.empty()) return b_.text(value.is_object() ? "{}" : "[]");
  std::vector<Id> parts{b_.text(value.is_object() ? "{" : "["), space()};
  bool first = true;
  for (const auto& [key, member] : value.items()) {
    if (!first) parts.push_back(comma());
    first = false;
    if (value.is_object()) {
      parts.push_back(b_.text(cat("\"", written(key, Writing::json), "\"")));
      parts.push_back(colon());
    }
    parts.push_back(constant(member, depth + 1));
  }
  parts.push_back(space());
  parts.push_back(b_.text(value.is_object() ? "}" : "]"));
  return b_.seq(std::move(parts));
}

Id integers(Builder& b, const NumberBounds& bounds) {
  const auto whole = [](double value) {
    return static_cast<int64_t>(std::clamp(value, -static_cast<double>(kMost), static_cast<double>(kMost)));
  };
  int64_t low = -kMost, high = kMost;
  if (bounds.min) {
    const double up = std::ceil(*bounds.min);
    low = std::max(low, whole(up) + (bounds.min_excluded && up == *bounds.min ? 1 : 0));
  }
  if (bounds.max) {
    const double down = std::floor(*bounds.max);
    high = std::min(high, whole(down) - (bounds.max_excluded && down == *bounds.max ? 1 : 0));
  }
  if (low > high || (bounds.min && *bounds.min > static_cast<double>(kMost)) ||
      (bounds.max && *bounds.max < -static_cast<double>(kMost)))
    return b.nothing();
  std::vector<Id> parts;
  if (high >= 0) parts.push_back(natural_range(b, std::max<int64_t>(low, 0), high));
  if (low < 0) parts.push_back(b.seq({b.text("-"), natural_range(b, std::max<int64_t>(-high, 1), -low)}));
  return b.alt(std::move(parts));
}

Id decimals(Builder& b, const NumberBounds& bounds) {
  const auto check = [](const std::optional<double>& value, bool excluded) {
    if (!value) return;
    // Beyond, two different decimals of this length may be the same number.
    if (std::fabs(*value) > 1e15 || (excluded && std::fabs(*value) >= 1e9))
      throw Error(Code::usage, cat("a bound of ", *value, " cannot be enforced"));
    if (*value != 0 && std::fabs(*value) < 1e-12)
      throw Error(Code::usage, cat("a bound of ", *value, " cannot be enforced"));
  };
  check(bounds.min, bounds.min_excluded);
  check(bounds.max, bounds.max_excluded);
  std::vector<Id> parts;
  if (!bounds.max || *bounds.max > 0 || (*bounds.max == 0 && !bounds.max_excluded)) {
    NumberBounds positive = bounds;
    if (positive.min.value_or(-1) < 0) {
      positive.min = 0;
      positive.min_excluded = false;
    }
    parts.push_back(magnitudes(b, positive));
  }
  if (!bounds.min || *bounds.min < 0) {
    NumberBounds mirrored;
    mirrored.min = 0;
    mirrored.min_excluded = true;
    if (bounds.max && *bounds.max < 0) {
      mirrored.min = -*bounds.max;
      mirrored.min_excluded = bounds.max_excluded;
    }
    if (bounds.min) {
      mirrored.max = -*bounds.min;
      mirrored.max_excluded = bounds.min_excluded;
    }
    parts.push_back(b.seq({b.text("-"), magnitudes(b, mirrored)}));
  }
  return b.alt(std::move(parts));
}

Id multiples(Builder& b, uint32_t divisor) {
  // States: remainders, and before them the start, behind "-", and behind a leading zero.
  std::vector<std::vector<Grammar::Edge>> states(divisor + 3u);
  std::vector<bool> final(divisor + 3u);
  const auto edge = [&](uint32_t from, int digit, uint32_t to) {
    states[from].push_back({static_cast<uint16_t>('0' + digit), static_cast<uint16_t>('0' + digit), to});
  };
  b.budget().spend(uint64_t{divisor} * 10);
  states[0].push_back({'-', '-', 1});
  edge(0, 0, 2);
  for (int d = 1; d <= 9; ++d) {
    edge(0, d, 3 + static_cast<uint32_t>(d) % divisor);
    edge(1, d, 3 + static_cast<uint32_t>(d) % divisor);
  }
  for (uint32_t r = 0; r < divisor; ++r)
    for (int d = 0; d <= 9; ++d) edge(3 + r, d, 3 + (r * 10 + static_cast<uint32_t>(d)) % divisor);
  final[2] = final[3] = true;
  return b.automaton(std::move(states), std::move(final));
}

const std::string_view kFormats =
    "date-time, date, time, duration, email, hostname, ipv4, ipv6, uuid, uri, json-pointer";

std::optional<Id> format_text(Builder& b, std::string_view format, Writing writing) {
  static const std::string date =
      "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
      "02-(?:0[1-9]|1[0-9]|2[0-8]))";
  static const std::string time =
      "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
  static const std::string name = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
  static const std::string octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
  static const std::map<std::string_view, std::string> patterns{
      {"date", date},
      {"time", time},
      {"date-time", date + "T" + time},
      {"duration",
       "P(?:[0-9]{1,4}W|[0-9]{1,4}D(?:T[0-9]{1,2}H(?:[0-9]{1,2}M)?)?|[0-9]{1,4}Y(?:[0-9]{1,2}M)?|"
       "T(?:[0-9]{1,4}H(?:[0-9]{1,2}M(?:[0-9]{1,2}S)?)?|[0-9]{1,4}M(?:[0-9]{1,2}S)?|[0-9]{1,4}S))"},
      {"email", "[A-Za-z0-9_+-]{1,32}(?:\\.[A-Za-z0-9_+-]{1,32}){0,4}@" + name + "(?:\\." + name + "){1,4}"},
      {"hostname", name + "(?:\\." + name + "){0,3}"},
      {"ipv4", octet + "(?:\\." + octet + "){3}"},
      {"ipv6", "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}|(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}"},
      {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"},
      {"uri", "[a-z][a-z0-9+.-]{0,15}://" + name + "(?:\\." + name +
                  "){0,4}(?::[1-9][0-9]{0,3})?(?:/[A-Za-z0-9._~-]{0,64}){0,12}"
                  "(?:\\?[A-Za-z0-9._~=&-]{0,128})?(?:#[A-Za-z0-9._~-]{0,64})?"},
      {"json-pointer", "(?:/(?:[A-Za-z0-9._-]|~0|~1){0,64}){0,16}"}};
  const auto found = patterns.find(format);
  if (found == patterns.end()) return std::nullopt;
  return regex(b, found->second, writing, Anchoring::whole);
}

}  // namespace glm53::grammar
