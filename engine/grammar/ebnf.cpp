#include "engine/grammar/ebnf.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "common/error.h"
#include "common/strings.h"
#include "engine/grammar/chars.h"
#include "engine/text/utf8.h"

namespace glm53::grammar {
namespace {

using Id = Builder::Id;
constexpr int kMaxDepth = 100;

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

class Parser {
 public:
  Parser(Builder& builder, std::string_view source) : b_(builder), text_(source) {}

  uint32_t parse() {
    skip();
    while (at_ < text_.size()) {
      const std::string name = rule_name();
      skip();
      if (!take("::=")) fail("expected ::=");
      skip();
      const uint32_t rule = rule_of(name);
      if (!defined_.try_emplace(name, true).second) fail(cat("rule \"", name, "\" is defined twice"));
      b_.define(rule, alternatives(0));
    }
    const auto root = rules_.find("root");
    if (root == rules_.end() || defined_.count("root") == 0)
      throw Error(Code::usage, "the grammar has no rule \"root\"");
    return root->second;
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    const std::string_view before = text_.substr(0, std::min(at_, text_.size()));
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t begin = before.rfind('\n');
    const size_t column = before.size() - (begin == std::string_view::npos ? 0 : begin + 1) + 1;
    throw Error(Code::usage, cat("grammar, line ", line, ", column ", column, ": ", what));
  }
  bool take(std::string_view s) {
    if (!text_.substr(at_).starts_with(s)) return false;
    at_ += s.size();
    return true;
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '#') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
        ++at_;
      } else {
        break;
      }
    }
  }
  std::string rule_name() {
    const size_t begin = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    if (begin == at_) fail("expected the name of a rule");
    return std::string(text_.substr(begin, at_ - begin));
  }
  /// A name and ::= behind it begin the next rule.
  bool at_rule() {
    const size_t begin = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    skip();
    const bool found = text_.substr(at_).starts_with("::=");
    at_ = begin;
    return found;
  }
  uint32_t rule_of(const std::string& name) {
    const auto found = rules_.find(name);
    return found != rules_.end() ? found->second : rules_.emplace(name, b_.rule(name)).first->second;
  }

  Id alternatives(int depth) {
    if (depth > kMaxDepth) fail("groups nested too deeply");
    std::vector<Id> out;
    do {
      skip();
      std::vector<Id> parts;
      while (at_ < text_.size() && peek() != '|' && peek() != ')') {
        if (is_name(peek()) && at_rule()) break;
        parts.push_back(quantified(atom(depth)));
        skip();
      }
      out.push_back(b_.seq(std::move(parts)));
    } while (take("|"));
    if (depth == 0 && peek() == ')') fail("an unmatched )");
    return b_.alt(std::move(out));
  }

  Id atom(int depth) {
    if (is_name(peek())) return b_.call(rule_of(rule_name()));
    if (take("(")) {
      const Id inner = alternatives(depth + 1);
      if (!take(")")) fail("a ( is not closed");
      return inner;
    }
    if (take("\"")) {
      std::string text;
      while (!take("\"")) text::append_utf8(text, code());
      return b_.text(text);
    }
    if (take("[")) return characters(b_, char_class(), Writing::plain);
    if (take(".")) return characters(b_, CodeSet::all(), Writing::plain);
    fail("expected a name, a literal, a class or a group");
  }

  Id quantified(Id atom) {
    while (true) {
      int64_t min = 0, max = Builder::kUnbounded;
      if (take("*")) {
      } else if (take("+")) {
        min = 1;
      } else if (take("?")) {
        max = 1;
      } else if (take("{")) {
        min = number();
        if (!take(",")) {
          max = min;
        } else if (peek() != '}') {
          max = number();
          if (max < min) fail("counts out of order");
        }
        if (!take("}")) fail("expected }");
      } else {
        return atom;
      }
      try {
        atom = b_.repeat(atom, min, max);
      } catch (const Error& e) {
        fail(e.what());
      }
    }
  }

  int64_t number() {
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    if (begin == at_) fail("expected a count");
    return parse_int(text_.substr(begin, at_ - begin)).value_or(INT64_MAX);
  }

  CodeSet char_class() {
    const bool negated = take("^");
    CodeSet out;
    while (!take("]")) {
      const uint32_t low = code();
      uint32_t high = low;
      if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        high = code();
      }
      if (high < low) fail("a range out of order");
      out.add(low, high);
    }
    return negated ? out.negated() : out;
  }

  uint32_t hex(size_t digits) {
    uint32_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      const char c = peek();
      const size_t digit =
          std::string_view("0123456789abcdef").find(static_cast<char>(c >= 'A' && c <= 'F' ? c + 32 : c));
      if (c == '\0' || digit == std::string_view::npos) fail("expected a hexadecimal digit");
      value = value * 16 + static_cast<uint32_t>(digit);
      ++at_;
    }
    if (value > kLastCodePoint || (value >= 0xD800 && value <= 0xDFFF)) fail("no character");
    return value;
  }

  /// A character of a literal or a class.
  uint32_t code() {
    if (at_ >= text_.size() || text_[at_] == '\n') fail("a literal or a class is not closed");
    if (!take("\\")) {
      const text::CodePoint c = text::code_point_at(text_, at_);
      if (c.value == 0xFFFD && c.bytes != 3) fail("not UTF-8");
      at_ += c.bytes;
      return c.value;
    }
    const char c = peek();
    ++at_;
    switch (c) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case 'x':
        return hex(2);
      case 'u':
        return hex(4);
      case 'U':
        return hex(8);
      case '"':
      case '\\':
      case '[':
      case ']':
      case '-':
      case '^':
        return static_cast<unsigned char>(c);
      default:
        break;
    }
    --at_;
    fail("an unknown escape");
  }

  Builder& b_;
  std::string_view text_;
  size_t at_ = 0;
  std::unordered_map<std::string, uint32_t> rules_;
  std::unordered_map<std::string, bool> defined_;
};

}  // namespace

uint32_t ebnf(Builder& builder, std::string_view source) {
  builder.budget().spend(source.size());
  return Parser(builder, source).parse();
}

}  // namespace glm53::grammar
