// Sets of characters (Unicode code points) and their bytes, plain or as inside a JSON string.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/grammar/grammar.h"

namespace glm53::grammar {

inline constexpr uint32_t kLastCodePoint = 0x10FFFF;

class CodeSet {
 public:
  CodeSet() = default;
  explicit CodeSet(std::vector<std::pair<uint32_t, uint32_t>> ranges);
  static CodeSet all() { return CodeSet({{0, kLastCodePoint}}); }
  void add(uint32_t low, uint32_t high);
  void add(const CodeSet& other);
  CodeSet negated() const;
  CodeSet without(const CodeSet& other) const;
  bool contains(uint32_t code) const;
  bool empty() const { return ranges_.empty(); }
  /// Sorted, apart from each other.
  const std::vector<std::pair<uint32_t, uint32_t>>& ranges() const { return ranges_; }

 private:
  std::vector<std::pair<uint32_t, uint32_t>> ranges_;
};

/// How text is written.
enum class Writing {
  plain,  ///< UTF-8
  json,   ///< inside a JSON string: characters that need no escape as they are, others by their shortest escape
};

/// One character of the set (surrogates excepted).
Builder::Id characters(Builder& builder, const CodeSet& set, Writing writing);
/// The text, character by character.
std::string written(std::string_view text, Writing writing);
/// One character of a JSON string in any form that JSON knows.
Builder::Id any_json_character(Builder& builder);

}  // namespace glm53::grammar
