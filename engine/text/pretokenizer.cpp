#include "engine/text/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string>

#include "common/error.h"
#include "common/strings.h"
#include "engine/text/utf8.h"

namespace glm53::text {

namespace {

constexpr uint32_t kCodePoints = 0x110000;

struct CodeDeleter {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};
struct MatchDeleter {
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};

std::string all_code_points() {
  std::string text;
  text.reserve(4u * kCodePoints);
  for (uint32_t c = 0; c < kCodePoints; ++c) {
    if (c < 0xD800 || c > 0xDFFF) append_utf8(text, c);
  }
  return text;
}

/// Calls `found` with every code point of `subject` that matches `property` ("\\p{L}").
void for_each_with(const char* property, const std::string& subject, const std::function<void(uint32_t)>& found) {
  const std::string pattern = cat(property, "+");
  int error = 0;
  PCRE2_SIZE where = 0;
  const std::unique_ptr<pcre2_code, CodeDeleter> code(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK, &error, &where, nullptr));
  if (!code) throw Error(Code::internal, cat("PCRE2 cannot compile ", pattern, ": error ", error));
  const std::unique_ptr<pcre2_match_data, MatchDeleter> data(pcre2_match_data_create_from_pattern(code.get(), nullptr));
  if (!data) throw Error(Code::memory, "PCRE2 cannot allocate match data");
  size_t at = 0;
  while (at < subject.size()) {
    const int rc = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(), at,
                               PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    if (rc == PCRE2_ERROR_NOMATCH) return;
    if (rc < 0) throw Error(Code::internal, cat("PCRE2 cannot match ", pattern, ": error ", rc));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    for (size_t i = range[0]; i < range[1];) {
      const CodePoint c = code_point_at(subject, i);
      found(c.value);
      i += c.bytes;
    }
    at = range[1];
  }
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
}

/// Length of a contraction ('s, 't, 're, 've, 'm, 'll, 'd) at `begin`; 0 = none.
size_t contraction(std::string_view text, size_t begin) {
  if (text[begin] != '\'' || begin + 1 >= text.size()) return 0;
  const char a = lower(text[begin + 1]);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if (begin + 2 >= text.size()) return 0;
  const char b = lower(text[begin + 2]);
  return (b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l') ? 3 : 0;
}

}  // namespace

Pretokenizer::Pretokenizer() : classes_(kCodePoints, other) {
  const std::string subject = all_code_points();
  for_each_with("\\p{L}", subject, [this](uint32_t c) { classes_[c] = letter; });
  for_each_with("\\p{N}", subject, [this](uint32_t c) { classes_[c] = number; });
  for (uint32_t c = 0; c < kCodePoints; ++c) {
    if (is_white_space(c)) classes_[c] = c == '\r' || c == '\n' ? line_end : space;
  }
}

Pretokenizer::Char Pretokenizer::at(std::string_view text, size_t i) const {
  const CodePoint c = code_point_at(text, i);
  return {c.value, c.bytes, classes_[c.value]};
}

size_t Pretokenizer::run(std::string_view text, size_t begin, Class kind) const {
  while (begin < text.size()) {
    const Char c = at(text, begin);
    if (c.kind != kind) break;
    begin += c.bytes;
  }
  return begin;
}

// The alternatives of the pattern in their order; the first that matches wins.
size_t Pretokenizer::end_of(std::string_view text, size_t begin) const {
  if (const size_t n = contraction(text, begin); n != 0) return begin + n;
  const Char first = at(text, begin);
  const size_t next = begin + first.bytes;
  if (first.kind == letter) return run(text, next, letter);
  const bool has_next = next < text.size();
  const Class second = has_next ? at(text, next).kind : other;
  if (first.kind != number && first.kind != line_end && has_next && second == letter) return run(text, next, letter);
  if (first.kind == number) {
    size_t end = next;
    for (int i = 0; i < 2 && end < text.size(); ++i) {
      const Char c = at(text, end);
      if (c.kind != number) break;
      end += c.bytes;
    }
    return end;
  }
  if (first.kind == other || (first.value == ' ' && has_next && second == other)) {
    return run(text, run(text, first.kind == other ? begin : next, other), line_end);
  }
  return end_of_space(text, begin);
}

size_t Pretokenizer::end_of_space(std::string_view text, size_t begin) const {
  size_t end = begin, after_line_end = 0, last = begin;
  while (end < text.size()) {
    const Char c = at(text, end);
    if (c.kind != space && c.kind != line_end) break;
    last = end;
    end += c.bytes;
    if (c.kind == line_end) after_line_end = end;
  }
  if (after_line_end != 0) return after_line_end;
  if (end == text.size() || last == begin) return end;
  return last;  // the last white-space character belongs to the next piece
}

void Pretokenizer::split(std::string_view text, const std::function<void(std::string_view)>& piece) const {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = end_of(text, begin);
    piece(text.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace glm53::text
