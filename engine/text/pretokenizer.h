// Splits text into the pieces that byte-pair encoding works on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

namespace glm53::text {

/// The split pattern of the model's tokenizer.json; another one is refused, because Pretokenizer implements this one.
inline constexpr std::string_view kSplitPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// Matches kSplitPattern by hand: linear in the text, no recursion, no backtracking limits. Letters (L*) and numbers
/// (N*) are PCRE2's. One difference: U+017F after an apostrophe is not taken for an `s`. Immutable, thread-safe.
class Pretokenizer {
 public:
  /// Reads the categories of all code points from PCRE2 once (some 10 ms). Throws Error(internal) if PCRE2 fails.
  Pretokenizer();
  /// Calls `piece` for consecutive parts that together are `text` (UTF-8; malformed bytes count as symbols).
  void split(std::string_view text, const std::function<void(std::string_view)>& piece) const;

 private:
  enum Class : uint8_t { other, letter, number, space, line_end };
  struct Char {
    uint32_t value;
    uint32_t bytes;
    Class kind;
  };
  Char at(std::string_view text, size_t i) const;
  size_t end_of(std::string_view text, size_t begin) const;
  size_t end_of_space(std::string_view text, size_t begin) const;
  size_t run(std::string_view text, size_t begin, Class kind) const;

  std::vector<Class> classes_;  ///< of every code point
};

}  // namespace glm53::text
