#include <doctest/doctest.h>

#include "tests/unit/grammar/grammars.h"

using namespace glm53;
using namespace glm53::grammar;

namespace {
Json regex_demand(const std::string& pattern) {
  return {{"content", {{"regex", pattern}}}, {"path", "guided_regex"}};
}
bool matches(const std::string& pattern, std::string_view text) {
  Engine engine = engine_of(regex_demand(pattern));
  return accepts(engine, text);
}
}  // namespace

TEST_CASE("regex: what it matches") {
  struct Case {
    const char *pattern, *yes, *no;
  };
  for (const Case& c : {Case{"abc", "abc", "ab"},
                        {"^abc$", "abc", "abcd"},
                        {"a|bc", "bc", "abc"},
                        {"(a|b)*c", "ababc", "abab"},
                        {"(?:a|b)+", "ab", ""},
                        {"(?<x>a)b?", "a", "b"},
                        {"a{3}", "aaa", "aaaa"},
                        {"a{2,}", "aaaa", "a"},
                        {"a{0,2}b", "aab", "aaab"},
                        {"a+?b*?", "ab", "ba"},
                        {"[a-c0-9_]+", "b_7", "d"},
                        {"[^a-c]", "d", "b"},
                        {"[^a]", "\xC3\xA9", "\xC3"},
                        {"\\d+\\.\\d{2}", "12.50", "12.5"},
                        {"\\w+\\s\\S", "ab_1 x", "ab_1  "},
                        {".", "\xF0\x9F\x98\x80", "\n"},
                        {"[\\u00e0-\\u00ff]", "\xC3\xA9", "e"},
                        {"\\x41\\u{1F600}", "A\xF0\x9F\x98\x80", "A"},
                        {"[\\]\\-a]+", "]-a", "b"},
                        {"\\(\\)\\[\\]\\{\\}\\.", "()[]{}.", "()[]{}x"},
                        {"", "", "a"},
                        {"a||b", "", "ab"}}) {
    CAPTURE(c.pattern);
    CHECK(matches(c.pattern, c.yes));
    CHECK_FALSE(matches(c.pattern, c.no));
  }
  CHECK_FALSE(matches(".*", "\xFF"));
  CHECK_FALSE(matches("[^a]*", "\xED\xA0\x80"));  // half a surrogate pair
}

TEST_CASE("regex: what cannot be enforced is refused by name and place") {
  struct Case {
    const char *pattern, *says;
  };
  for (const Case& c : {Case{"a(?=b)", "look-around"},
                        {"(?<!a)b", "look-around"},
                        {"(a)\\1", "back-references"},
                        {"\\bword\\b", "\\b"},
                        {"\\p{L}", "\\p"},
                        {"(?i)a", "this kind of group"},
                        {"a(", "not closed"},
                        {"a)", "unmatched"},
                        {"[a", "not closed"},
                        {"*a", "nothing to repeat"},
                        {"a**", "nothing to repeat"},
                        {"a{2,1}", "out of order"},
                        {"a{1,100000}", "repetition of 100000"},
                        {"(a^b)", "^"},
                        {"(a$)", "$"},
                        {"[z-a]", "out of order"},
                        {"\\", "backslash"},
                        {"[\\d-x]", "range"},
                        {"((((a{100}){100}){100}){100})", "too large"}}) {
    CAPTURE(c.pattern);
    const std::string said = refusal(regex_demand(c.pattern));
    CAPTURE(said);
    CHECK(said.find("guided_regex") == 0);
    CHECK(said.find(c.says) != std::string::npos);
  }
}
