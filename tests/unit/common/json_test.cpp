#include "common/json.h"

#include <random>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"

using namespace glm53;

namespace {

std::string error_of(std::string_view text, const JsonLimits& limits = {}) {
  try {
    parse_json(text, limits);
  } catch (const Error& e) {
    CHECK(e.code() == Code::usage);
    CHECK(valid_utf8(e.what()));
    return e.what();
  }
  return "";
}

bool starts(const std::string& text, std::string_view part) {
  return text.starts_with(part);
}

}  // namespace

TEST_CASE("json: values, order and duplicates") {
  CHECK(dump(parse_json(R"( {"b":1,"a":[true,null,-2,1.5,"x"],"c":{}} )")) ==
        R"({"b":1,"a":[true,null,-2,1.5,"x"],"c":{}})");
  CHECK(dump(parse_json("18446744073709551615")) == "18446744073709551615");
  CHECK(dump(parse_json(R"({"a":1,"b":2,"a":{"x":3},"c":4,"a":5})")) == R"({"a":5,"b":2,"c":4})");
}

TEST_CASE("json: mistakes are named with line and column") {
  CHECK(starts(error_of(""), "invalid JSON at line 1, column 1: "));
  CHECK(starts(error_of("{\n  \"a\": ,\n}"), "invalid JSON at line 2, column 8: "));
  CHECK(starts(error_of("[1,]"), "invalid JSON at line 1, column 4: "));
  CHECK(starts(error_of("[1] x"), "invalid JSON at line 1, column 5: "));
  for (const char* bad :
       {"{", "[", "\"", "nul", "{\"a\"}", "01", "1e999", "'a'", "[1 2]", "\"\x01\"", "\"\\x\"", "// c\n1"}) {
    CAPTURE(bad);
    CHECK_FALSE(error_of(bad).empty());
  }
  CHECK_FALSE(error_of("\"\xff\"").empty());
  CHECK_FALSE(error_of("\"\xed\xa0\x80\"").empty());
}

TEST_CASE("json: lone surrogates become U+FFFD, pairs stay") {
  CHECK(parse_json(R"("\ud800")") == "\uFFFD");
  CHECK(parse_json(R"("a\uDC00b\uD83D\uDE00c\uD83Dx\uD83D\uD83D\uDE00")") ==
        "a\uFFFDb\U0001F600c\uFFFDx\uFFFD\U0001F600");
  CHECK(parse_json(R"("\\ud800")") == "\\ud800");
  CHECK_FALSE(error_of(R"("\ud8")").empty());
}

TEST_CASE("json: limits") {
  JsonLimits limits;
  limits.max_depth = 3;
  limits.max_values = 10;
  limits.max_bytes = 100;
  CHECK(error_of("[[[1]]]", limits).empty());
  CHECK(starts(error_of("[[[[1]]]]", limits), "JSON is nested deeper than 3"));
  CHECK(starts(error_of(R"({"a":{"a":{"a":{"a":1}}}})", limits), "JSON is nested deeper than 3"));
  CHECK(starts(error_of("[1,2,3,4,5,6,7,8,9,10]", limits), "JSON has more than 10 values"));
  CHECK(starts(error_of(std::string(101, ' '), limits), "JSON of 101 bytes"));
  CHECK(starts(error_of(std::string(1 << 20, '[')), "JSON is nested deeper than 128"));
}

TEST_CASE("json: large objects with equal keys take linear time") {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) text += cat(i == 0 ? "" : ",", "\"k", i % 100000, "\":", i);
  text += "}";
  const auto value = parse_json(text);
  CHECK(value.size() == 100000);
  CHECK(value.front() == 100000);
}

TEST_CASE("json: dump replaces invalid UTF-8") {
  CHECK(dump(nlohmann::ordered_json("a\xff")) == "\"a\uFFFD\"");
}

TEST_CASE("json: damaged documents are refused or read, never worse") {
  const std::string good = R"({"a":[1,2.5,{"b":"\ud83d\ude00 \u00e9"}],"c":null,"d":"\ud800","e":-1e5})";
  std::mt19937 random(11);
  for (int round = 0; round < 5000; ++round) {
    std::string text = good.substr(0, random() % (good.size() + 1));
    for (int i = 0; i < 3 && !text.empty(); ++i) text[random() % text.size()] = static_cast<char>(random());
    try {
      const std::string out = dump(parse_json(text));
      CHECK(dump(parse_json(out)) == out);
    } catch (const Error& e) {
      CHECK(e.code() == Code::usage);
    }
  }
}
