#include <random>
#include <string>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "engine/text/json_text.h"
#include "engine/text/utf8.h"

using namespace glm53::text;

namespace {

const std::string kBad(kReplacement);

std::string one_shot(std::string_view bytes) {
  std::string out;
  Utf8Stream stream;
  stream.push(bytes, out);
  stream.flush(out);
  return out;
}

}  // namespace

TEST_CASE("malformed bytes become one U+FFFD a maximal subpart") {
  CHECK(one_shot("caf\xC3\xA9") == "caf\xC3\xA9");
  CHECK(one_shot("\xFF") == kBad);
  CHECK(one_shot("\xC0\xAF") == kBad + kBad);             // overlong
  CHECK(one_shot("\xE0\x80\x80") == kBad + kBad + kBad);  // overlong: E0 may not be followed by 80
  CHECK(one_shot("\xED\xA0\x80") == kBad + kBad + kBad);  // surrogate
  CHECK(one_shot("\xF0\x9F\x98") == kBad);                // cut emoji
  CHECK(one_shot("\xF0\x9F\x98"
                 "A") == kBad + "A");
  CHECK(one_shot("\xF4\x90\x80\x80") == kBad + kBad + kBad + kBad);  // beyond U+10FFFF
  CHECK(one_shot("\xE2\x82\xE2\x82\xAC") == kBad + "\xE2\x82\xAC");
  CHECK(one_shot("\xF0\x9F\x98\x80") == "\xF0\x9F\x98\x80");
}

TEST_CASE("cutting a byte stream anywhere changes nothing, and every delta is valid UTF-8") {
  std::mt19937 random(7);
  const std::string alphabet = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xED\xA0\xFF\xF4\x90";
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (size_t n = random() % 24; n > 0; --n) bytes += alphabet[random() % alphabet.size()];
    Utf8Stream stream;
    std::string joined;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = 1 + random() % 4;
      std::string delta;
      stream.push(std::string_view(bytes).substr(at, n), delta);
      REQUIRE(glm53::valid_utf8(delta));
      joined += delta;
      at += n;
    }
    stream.flush(joined);
    REQUIRE(joined == one_shot(bytes));
    std::string walked;
    for (size_t at = 0; at < bytes.size();) {
      const CodePoint c = code_point_at(bytes, at);
      append_utf8(walked, c.value);
      at += c.bytes;
    }
    REQUIRE(walked == joined);
  }
}

TEST_CASE("strip removes what Python removes") {
  CHECK(strip("\n \x1C\x1F x y\xC2\xA0\xE3\x80\x80\xC2\x85") == "x y");
  CHECK(strip("\xE1\xA0\x8E"
              "x") ==
        "\xE1\xA0\x8E"
        "x");  // U+180E is no white space
  CHECK(strip(" \t\r\n") == "");
  CHECK(strip("") == "");
  CHECK(strip("\xFF ") == "\xFF");
}

TEST_CASE("floating-point numbers print as Python's repr") {
  CHECK(python_float(1.0) == "1.0");
  CHECK(python_float(0.1) == "0.1");
  CHECK(python_float(-0.0) == "-0.0");
  CHECK(python_float(0.0) == "0.0");
  CHECK(python_float(1e20) == "1e+20");
  CHECK(python_float(1e-7) == "1e-07");
  CHECK(python_float(0.0001) == "0.0001");
  CHECK(python_float(0.00001234) == "1.234e-05");
  CHECK(python_float(1e15) == "1000000000000000.0");
  CHECK(python_float(1e16) == "1e+16");
  CHECK(python_float(123456.789) == "123456.789");
  CHECK(python_float(-1.7976931348623157e308) == "-1.7976931348623157e+308");
  CHECK(python_float(5e-324) == "5e-324");
  CHECK(python_float(1234567890123456.5) == "1234567890123456.5");
}
