#include "engine/grammar/regex.h"

#include <optional>

#include "common/error.h"
#include "common/strings.h"
#include "engine/text/utf8.h"

namespace glm53::grammar {
namespace {

using Id = Builder::Id;
constexpr int kMaxDepth = 100;

const CodeSet kDigits({{'0', '9'}});
const CodeSet kWord({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}});
const CodeSet kSpace({{9, 13}, {' ', ' '}});
// What \S must not be: all white space of ECMA-262.
const CodeSet kAllSpace({{9, 13},
                         {0x1C, 0x20},
                         {0x85, 0x85},
                         {0xA0, 0xA0},
                         {0x1680, 0x1680},
                         {0x2000, 0x200A},
                         {0x2028, 0x2029},
                         {0x202F, 0x202F},
                         {0x205F, 0x205F},
                         {0x3000, 0x3000},
                         {0xFEFF, 0xFEFF}});
const CodeSet kLineEnds({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}});

class Parser {
 public:
  Parser(Builder& builder, std::string_view pattern, Writing writing, Anchoring anchoring)
      : b_(builder), text_(pattern), writing_(writing), anchoring_(anchoring) {}

  Id parse() {
    std::vector<Id> alternatives;
    do {
      const bool begins = take('^');
      std::vector<Id> parts;
      if (anchoring_ == Anchoring::search && !begins) parts.push_back(any_text());
      parts.push_back(sequence(0));
      const bool ends = take('$');
      if (ends && at_ < text_.size() && text_[at_] != '|') fail("$ is supported at the end of an alternative only");
      if (anchoring_ == Anchoring::search && !ends) parts.push_back(any_text());
      alternatives.push_back(b_.seq(std::move(parts)));
    } while (take('|'));
    if (at_ < text_.size()) fail("an unmatched )");
    return b_.alt(std::move(alternatives));
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw Error(Code::usage, cat("regular expression, at byte ", at_, ": ", what));
  }
  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view s) {
    if (!text_.substr(at_).starts_with(s)) return false;
    at_ += s.size();
    return true;
  }
  Id any_text() { return b_.repeat(characters(b_, CodeSet::all(), writing_), 0, Builder::kUnbounded); }

  Id sequence(int depth) {
    std::vector<Id> parts;
    while (at_ < text_.size() && text_[at_] != '|' && text_[at_] != ')') {
      if (text_[at_] == '$') {
        if (depth == 0) break;
        fail("$ inside a group is not supported");
      }
      parts.push_back(quantified(atom(depth)));
    }
    return b_.seq(std::move(parts));
  }

  Id quantified(Id atom) {
    int64_t min = 0, max = Builder::kUnbounded;
    if (take('*')) {
    } else if (take('+')) {
      min = 1;
    } else if (take('?')) {
      max = 1;
    } else if (text_.substr(at_).starts_with("{")) {
      if (!counts(min, max)) fail("{ needs a count, or a backslash before it");
    } else {
      return atom;
    }
    take('?');  // lazy: the same texts
    if (at_ < text_.size() && (text_[at_] == '*' || text_[at_] == '+' || text_[at_] == '{' || text_[at_] == '?'))
      fail("nothing to repeat");
    try {
      return b_.repeat(atom, min, max);
    } catch (const Error& e) {
      fail(e.what());
    }
  }

  bool counts(int64_t& min, int64_t& max) {
    const size_t end = text_.find('}', at_);
    if (end == std::string_view::npos) return false;
    const std::string_view inside = text_.substr(at_ + 1, end - at_ - 1);
    const size_t comma = inside.find(',');
    const auto number = [&](std::string_view digits) -> std::optional<int64_t> {
      if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
      return parse_int(digits).value_or(INT64_MAX);
    };
    const auto low = number(inside.substr(0, comma));
    if (!low) return false;
    min = max = *low;
    if (comma != std::string_view::npos) {
      const std::string_view rest = inside.substr(comma + 1);
      const auto high = number(rest);
      if (!high && !rest.empty()) return false;
      max = high.value_or(Builder::kUnbounded);
      if (high && *high < min) fail("counts out of order");
    }
    at_ = end + 1;
    return true;
  }

  Id group(int depth) {
    if (depth >= kMaxDepth) fail("groups nested too deeply");
    if (take('?')) {
      if (take("=") || take("!") || take("<=") || take("<!")) fail("look-around is not supported");
      if (take('<')) {
        const size_t end = text_.find('>', at_);
        if (end == std::string_view::npos || end == at_) fail("a group's name is not closed");
        at_ = end + 1;
      } else if (!take(':')) {
        fail("this kind of group is not supported");
      }
    }
    std::vector<Id> alternatives;
    do {
      if (at_ < text_.size() && text_[at_] == '^') fail("^ inside a group is not supported");
      alternatives.push_back(sequence(depth + 1));
    } while (take('|'));
    if (!take(')')) fail("a ( is not closed");
    return b_.alt(std::move(alternatives));
  }

  Id atom(int depth) {
    if (take('(')) return group(depth);
    if (take('.')) return characters(b_, kLineEnds.negated(), writing_);
    if (take('[')) return characters(b_, char_class(), writing_);
    if (take('\\')) return characters(b_, escape(false), writing_);
    const char c = text_[at_];
    if (c == '*' || c == '+' || c == '?') fail("nothing to repeat");
    if (c == '^') fail("^ is supported at the start of an alternative only");
    if (c == ']' || c == '}' || c == '{') fail("write a backslash before brackets that stand for themselves");
    const uint32_t code = next_code();
    return characters(b_, CodeSet({{code, code}}), writing_);
  }

  uint32_t next_code() {
    const text::CodePoint c = text::code_point_at(text_, at_);
    if (c.value == 0xFFFD && c.bytes != 3) fail("not UTF-8");
    at_ += c.bytes;
    return c.value;
  }

  CodeSet char_class() {
    const bool negated = take('^');
    CodeSet out;
    while (!take(']')) {
      if (at_ >= text_.size()) fail("a [ is not closed");
      const CodeSet low = take('\\') ? escape(true) : single(next_code());
      const bool range = at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']';
      if (!range) {
        out.add(low);
        continue;
      }
      ++at_;
      const CodeSet high = take('\\') ? escape(true) : single(next_code());
      const auto one = [&](const CodeSet& set) {
        if (set.ranges().size() != 1 || set.ranges()[0].first != set.ranges()[0].second)
          fail("a class cannot end a range");
        return set.ranges()[0].first;
      };
      if (one(low) > one(high)) fail("a range out of order");
      out.add(one(low), one(high));
    }
    return negated ? out.negated() : out;
  }
  static CodeSet single(uint32_t code) { return CodeSet({{code, code}}); }

  uint32_t hex(size_t digits) {
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      const char c = at_ < text_.size() ? text_[at_++] : '?';
      const size_t digit =
          std::string_view("0123456789abcdef").find(static_cast<char>(c >= 'A' && c <= 'F' ? c + 32 : c));
      if (digit == std::string_view::npos) fail("expected a hexadecimal digit");
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
  }

  uint32_t unicode() {
    if (take('{')) {
      const size_t end = text_.find('}', at_);
      if (end == std::string_view::npos || end == at_ || end - at_ > 6) fail("\\u{…} needs 1 to 6 digits");
      const uint32_t code = hex(end - at_);
      ++at_;
      if (code > kLastCodePoint) fail("no code point");
      return code;
    }
    const uint32_t code = hex(4);
    if (code < 0xD800 || code > 0xDFFF) return code;
    if (code > 0xDBFF || !take("\\u")) fail("half a surrogate pair");
    const uint32_t low = hex(4);
    if (low < 0xDC00 || low > 0xDFFF) fail("half a surrogate pair");
    return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }

  CodeSet escape(bool in_class) {
    if (at_ >= text_.size()) fail("a backslash at the end");
    const char c = text_[at_++];
    switch (c) {
      case 'd':
        return kDigits;
      case 'D':
        return kDigits.negated();
      case 'w':
        return kWord;
      case 'W':
        return kWord.negated();
      case 's':
        return kSpace;
      case 'S':
        return kAllSpace.negated();
      case 't':
        return single('\t');
      case 'n':
        return single('\n');
      case 'r':
        return single('\r');
      case 'f':
        return single('\f');
      case 'v':
        return single('\v');
      case 'x':
        return single(hex(2));
      case 'u':
        return single(unicode());
      case 'b':
        if (in_class) return single('\b');
        fail("\\b is not supported");
      case '0':
        if (at_ >= text_.size() || text_[at_] < '0' || text_[at_] > '9') return single(0);
        fail("octal escapes are not supported");
      default:
        break;
    }
    if (c >= '1' && c <= '9') fail("back-references are not supported");
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<unsigned char>(c) >= 0x80;
    if (letter) fail(cat("\\", c, " is not supported"));
    return single(static_cast<unsigned char>(c));
  }

  Builder& b_;
  std::string_view text_;
  Writing writing_;
  Anchoring anchoring_;
  size_t at_ = 0;
};

}  // namespace

Builder::Id regex(Builder& builder, std::string_view pattern, Writing writing, Anchoring anchoring) {
  builder.budget().spend(pattern.size());
  return Parser(builder, pattern, writing, anchoring).parse();
}

}  // namespace glm53::grammar
