// UTF-8: strict decoding in a stream, and the white-space sets of the text formats.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace glm53::text {

/// U+FFFD as UTF-8.
inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Appends a code point (at most U+10FFFF, no surrogate).
void append_utf8(std::string& out, uint32_t code_point);

/// Code point at `at` and its length in bytes. Text that is not well-formed yields U+FFFD, one maximal subpart at a
/// time (WHATWG Encoding, UTF-8 decoder), so the walk always advances and never reads past the end.
struct CodePoint {
  uint32_t value = 0;
  uint32_t bytes = 0;
};
CodePoint code_point_at(std::string_view text, size_t at);

/// Decoder of a byte stream: complete code points come out at once, an unfinished one (at most three bytes) waits,
/// bytes that can never be completed become U+FFFD, one a maximal subpart.
class Utf8Stream {
 public:
  void push(std::string_view bytes, std::string& out);
  /// End of the stream, or a boundary no code point may cross.
  void flush(std::string& out);
  bool pending() const { return !tail_.empty(); }

 private:
  std::string tail_;
  int needed_ = 0;
  unsigned char low_ = 0x80, high_ = 0xBF;
};

/// Unicode White_Space: what `\s` of the split pattern means. (PCRE2's own `\s` would add U+180E.)
bool is_white_space(uint32_t code_point);
/// What Python's str.strip() removes: White_Space and U+001C..001F.
bool is_strippable(uint32_t code_point);
/// Bytes of strippable text at the start.
size_t leading_space(std::string_view text);
std::string_view strip(std::string_view text);

}  // namespace glm53::text
