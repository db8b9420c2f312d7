#include <doctest/doctest.h>

#include "cli/commands.h"
#include "common/strings.h"

using glm53::cli::degenerate;

namespace {
std::string repeated(std::string_view piece, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += piece;
  return out;
}
}  // namespace

TEST_CASE("language is accepted") {
  CHECK_FALSE(degenerate("Paris."));
  CHECK_FALSE(
      degenerate("Once upon a time there was a small fox. The fox lived near the river, and the fox had a friend.\n"
                 "They walked to the hill and looked at the sea until the sun went down behind the trees."));
  CHECK_FALSE(degenerate("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25"));
}

TEST_CASE("what is no language is refused with the reason") {
  CHECK(degenerate("").value() == "the answer is empty");
  CHECK(degenerate(" \n ").value() == "the answer is empty");
  CHECK(degenerate("\xff\xfe").value() == "the answer is not UTF-8");
  CHECK(degenerate(repeated("the ", 40)).value() == "the answer repeats one word");
  CHECK(degenerate(repeated("a b c ", 40)).value() == "the answer repeats a few words");
  CHECK(degenerate(repeated("\xEF\xBF\xBD", 10)).value() == "the answer is full of broken characters");
  CHECK(degenerate(repeated("x", 500)).value() == "the answer is one long run without spaces");
}
