#include "engine/grammar/chars.h"

#include <algorithm>

#include "engine/text/json_text.h"
#include "engine/text/utf8.h"

namespace glm53::grammar {
namespace {

using Id = Builder::Id;

Id byte_range(Builder& b, uint32_t low, uint32_t high) {
  return b.range(static_cast<uint8_t>(low), static_cast<uint8_t>(high));
}

/// Code points of equal encoded length, split so that each part is a sequence of byte ranges.
void split(Builder& b, uint32_t low, uint32_t high, std::vector<Id>& out) {
  b.budget().spend(1);
  if (high < 0x80) {
    out.push_back(byte_range(b, low, high));
    return;
  }
  const int tail = high < 0x800 ? 1 : high < 0x10000 ? 2 : 3;
  for (int i = 1; i <= tail; ++i) {
    const uint32_t mask = (1u << (6 * i)) - 1;
    if ((low & ~mask) == (high & ~mask)) continue;
    if ((low & mask) != 0) {
      split(b, low, low | mask, out);
      split(b, (low | mask) + 1, high, out);
      return;
    }
    if ((high & mask) != mask) {
      split(b, low, (high & ~mask) - 1, out);
      split(b, high & ~mask, high, out);
      return;
    }
  }
  std::string first, last;
  text::append_utf8(first, low);
  text::append_utf8(last, high);
  std::vector<Id> parts;
  for (size_t i = 0; i < first.size(); ++i)
    parts.push_back(byte_range(b, static_cast<unsigned char>(first[i]), static_cast<unsigned char>(last[i])));
  out.push_back(b.seq(std::move(parts)));
}

Id plain(Builder& b, const CodeSet& set) {
  static constexpr std::pair<uint32_t, uint32_t> kLengths[] = {
      {0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xD7FF}, {0xE000, 0xFFFF}, {0x10000, kLastCodePoint}};
  std::vector<Id> parts;
  ByteSet ascii;
  for (const auto& [low, high] : set.ranges()) {
    for (const auto& [from, to] : kLengths) {
      const uint32_t l = std::max(low, from), h = std::min(high, to);
      if (l > h) continue;
      if (h < 0x80) {
        for (uint32_t c = l; c <= h; ++c) ascii.set(c);
      } else {
        split(b, l, h, parts);
      }
    }
  }
  if (ascii.any()) parts.insert(parts.begin(), b.set(ascii));
  return b.alt(std::move(parts));
}

const CodeSet& escaped() {
  static const CodeSet set({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}});
  return set;
}

}  // namespace

CodeSet::CodeSet(std::vector<std::pair<uint32_t, uint32_t>> ranges) {
  for (const auto& [low, high] : ranges) add(low, high);
}

void CodeSet::add(uint32_t low, uint32_t high) {
  auto first = std::lower_bound(ranges_.begin(), ranges_.end(), low,
                                [](const auto& r, uint32_t value) { return r.second + 1 < value; });
  auto last = first;
  while (last != ranges_.end() && last->first <= high + 1) {
    low = std::min(low, last->first);
    high = std::max(high, last->second);
    ++last;
  }
  first = ranges_.erase(first, last);
  ranges_.insert(first, {low, high});
}

void CodeSet::add(const CodeSet& other) {
  for (const auto& [low, high] : other.ranges_) add(low, high);
}

CodeSet CodeSet::negated() const {
  CodeSet out;
  uint32_t next = 0;
  for (const auto& [low, high] : ranges_) {
    if (low > next) out.ranges_.emplace_back(next, low - 1);
    next = high + 1;
  }
  if (next <= kLastCodePoint) out.ranges_.emplace_back(next, kLastCodePoint);
  return out;
}

CodeSet CodeSet::without(const CodeSet& other) const {
  CodeSet joined = negated();
  joined.add(other);
  return joined.negated();
}

bool CodeSet::contains(uint32_t code) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const auto& r) { return r.first <= code && code <= r.second; });
}

Builder::Id characters(Builder& b, const CodeSet& set, Writing writing) {
  if (writing == Writing::plain) return plain(b, set);
  std::vector<Id> parts{plain(b, set.without(escaped()))};
  std::vector<std::string> escapes;
  for (const auto& [low, high] : escaped().ranges()) {
    for (uint32_t c = low; c <= high; ++c)
      if (set.contains(c)) escapes.push_back(written(std::string(1, static_cast<char>(c)), Writing::json));
  }
  if (!escapes.empty()) parts.push_back(b.literals(std::move(escapes)));
  return b.alt(std::move(parts));
}

std::string written(std::string_view text, Writing writing) {
  std::string out;
  if (writing == Writing::json)
    text::append_escaped(out, text);
  else
    out = text;
  return out;
}

Builder::Id any_json_character(Builder& b) {
  ByteSet hex, short_escapes;
  for (const char c : std::string_view("0123456789abcdefABCDEF")) hex.set(static_cast<unsigned char>(c));
  for (const char c : std::string_view("\"\\/bfnrt")) short_escapes.set(static_cast<unsigned char>(c));
  const auto of = [&](std::string_view letters) {
    ByteSet bytes;
    for (const char c : letters) bytes.set(static_cast<unsigned char>(c));
    return b.set(bytes);
  };
  const Id h = b.set(hex);
  // \u escapes of everything but surrogates, and pairs of these.
  const Id d = of("dD");
  const Id single = b.alt({b.seq({of("0123456789abcefABCEF"), h, h, h}), b.seq({d, of("01234567"), h, h})});
  const Id pair = b.seq({d, of("89abAB"), h, h, b.text("\\u"), d, of("cdefCDEF"), h, h});
  return b.alt({plain(b, CodeSet::all().without(escaped())),
                b.seq({b.text("\\"), b.alt({b.set(short_escapes), b.seq({b.text("u"), b.alt({single, pair})})})})});
}

}  // namespace glm53::grammar
