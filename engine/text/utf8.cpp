#include "engine/text/utf8.h"

namespace glm53::text {

namespace {

struct Lead {
  int needed;
  unsigned char low, high;
};

/// Bytes that follow a lead byte and the range of the first of them; needed = -1: no lead byte.
Lead lead_of(unsigned char c) {
  if (c < 0x80) return {0, 0x80, 0xBF};
  if (c < 0xC2) return {-1, 0, 0};
  if (c < 0xE0) return {1, 0x80, 0xBF};
  if (c < 0xF0) {
    return {2, static_cast<unsigned char>(c == 0xE0 ? 0xA0 : 0x80),
            static_cast<unsigned char>(c == 0xED ? 0x9F : 0xBF)};
  }
  if (c < 0xF5) {
    return {3, static_cast<unsigned char>(c == 0xF0 ? 0x90 : 0x80),
            static_cast<unsigned char>(c == 0xF4 ? 0x8F : 0xBF)};
  }
  return {-1, 0, 0};
}

}  // namespace

void append_utf8(std::string& out, uint32_t c) {
  const auto put = [&out](uint32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6));
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

CodePoint code_point_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return {first, 1};
  Lead lead = lead_of(first);
  if (lead.needed < 0) return {0xFFFD, 1};
  uint32_t value = first & (0x3Fu >> lead.needed);
  uint32_t n = 1;
  for (; n <= static_cast<uint32_t>(lead.needed); ++n) {
    if (at + n >= text.size() || byte(at + n) < lead.low || byte(at + n) > lead.high) return {0xFFFD, n};
    value = (value << 6) | (byte(at + n) & 0x3Fu);
    lead.low = 0x80;
    lead.high = 0xBF;
  }
  return {value, n};
}

void Utf8Stream::push(std::string_view bytes, std::string& out) {
  for (size_t i = 0; i < bytes.size();) {
    const auto c = static_cast<unsigned char>(bytes[i]);
    if (needed_ == 0) {
      ++i;
      const Lead lead = lead_of(c);
      if (lead.needed < 0) {
        out += kReplacement;
      } else if (lead.needed == 0) {
        out += static_cast<char>(c);
      } else {
        tail_.assign(1, static_cast<char>(c));
        needed_ = lead.needed;
        low_ = lead.low;
        high_ = lead.high;
      }
      continue;
    }
    if (c < low_ || c > high_) {
      flush(out);  // the byte itself is looked at again
      continue;
    }
    ++i;
    low_ = 0x80;
    high_ = 0xBF;
    tail_ += static_cast<char>(c);
    if (--needed_ == 0) {
      out += tail_;
      tail_.clear();
    }
  }
}

void Utf8Stream::flush(std::string& out) {
  // The tail is a prefix of a valid code point, hence one maximal subpart.
  if (!tail_.empty()) out += kReplacement;
  tail_.clear();
  needed_ = 0;
}

bool is_white_space(uint32_t c) {
  if (c < 0x80) return c == 0x20 || (c >= 0x09 && c <= 0x0D);
  switch (c) {
    case 0x85:
    case 0xA0:
    case 0x1680:
    case 0x2028:
    case 0x2029:
    case 0x202F:
    case 0x205F:
    case 0x3000:
      return true;
    default:
      return c >= 0x2000 && c <= 0x200A;
  }
}

bool is_strippable(uint32_t c) {
  return is_white_space(c) || (c >= 0x1C && c <= 0x1F);
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const CodePoint c = code_point_at(text, at);
    if (!is_strippable(c.value)) break;
    at += c.bytes;
  }
  return at;
}

std::string_view strip(std::string_view text) {
  text.remove_prefix(leading_space(text));
  while (!text.empty()) {
    size_t at = text.size() - 1;
    while (at > 0 && text.size() - at < 4 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
    const CodePoint c = code_point_at(text, at);
    if (at + c.bytes != text.size() || !is_strippable(c.value)) break;
    text.remove_suffix(c.bytes);
  }
  return text;
}

}  // namespace glm53::text
