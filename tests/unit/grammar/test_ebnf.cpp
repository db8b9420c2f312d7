#include <doctest/doctest.h>

#include "tests/unit/grammar/grammars.h"

using namespace glm53;
using namespace glm53::grammar;

namespace {
Json demand(const std::string& source) {
  return {{"content", {{"ebnf", source}}}, {"path", "guided_grammar"}};
}
bool matches(const std::string& source, std::string_view text) {
  Engine engine = engine_of(demand(source));
  return accepts(engine, text);
}
}  // namespace

TEST_CASE("ebnf: rules, literals, classes, repetition, recursion") {
  const std::string sums = R"~(
root ::= expr   # a sum
expr ::= term ([-+] term)*
term ::= factor (("*" | "/") factor)*
factor ::= [0-9]+ | "(" expr ")"
)~";
  for (const char* good : {"1", "12+3*4", "(1+(2-3))*4", "((((7))))"}) CHECK(matches(sums, good));
  for (const char* bad : {"", "1+", "(1", "1)", "a", "1 + 2"}) CHECK_FALSE(matches(sums, bad));
  CHECK(matches("root ::= \"\\\"\\u00e9\\x41\\n\" .",
                "\"\xC3\xA9"
                "A\n\xE2\x82\xAC"));
  CHECK(matches("root ::= [^\\]a]{2,3}\n", "bc"));
  CHECK_FALSE(matches("root ::= [^\\]a]{2,3}\n", "b]"));
  CHECK(matches("root ::= a | \nb\na ::= \"x\"\nb ::= \"y\" root?", "yyx"));
  CHECK(matches("root ::= \"a\" root \"b\" | \"\"", "aaabbb"));
  CHECK_FALSE(matches("root ::= \"a\" root \"b\" | \"\"", "aaabb"));
}

TEST_CASE("ebnf: what is wrong is said with its place") {
  struct Case {
    const char *source, *says;
  };
  for (const Case& c : {Case{"x ::= \"a\"", "no rule \"root\""},
                        {"root ::= y", "\"y\" is not defined"},
                        {"root ::= root \"a\" | \"b\"", "calls itself"},
                        {"root ::= x \"a\"\nx ::= (\"b\"?) root | \"c\"", "calls itself"},
                        {"root ::= \"a\" root", "no finite text"},
                        {"root ::= \"a", "not closed"},
                        {"root ::= (\"a\"", "not closed"},
                        {"root ::= \"a\")", "unmatched"},
                        {"root ::= \"a\"\nroot ::= \"b\"", "twice"},
                        {"root ::= \"\\q\"", "line 1, column"},
                        {"root \"a\"", "::="},
                        {"root ::= [z-a]", "out of order"},
                        {"root ::= \"a\"{1,100000}", "repetition of 100000"}}) {
    CAPTURE(c.source);
    const std::string said = refusal(demand(c.source));
    CAPTURE(said);
    CHECK(said.find("guided_grammar") == 0);
    CHECK(said.find(c.says) != std::string::npos);
  }
}
