#include <random>
#include <string>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/text/output_parser.h"
#include "engine/text/stop_matcher.h"
#include "tests/unit/text/tiny.h"

using namespace glm53;
using namespace glm53::text;

namespace {

using Ids = std::vector<int32_t>;

struct Split {
  std::string reasoning, content;
  int64_t reasoning_tokens = 0;
  bool operator==(const Split&) const = default;
};

Split split(const std::string& output, OutputStart start) {
  OutputParser parser(tiny(), start);
  std::vector<OutputEvent> events;
  for (const int32_t id : tiny().encode(output)) parser.push(id, events);
  parser.finish(false, events);
  Split result{{}, {}, parser.reasoning_tokens()};
  for (const OutputEvent& e : events) {
    CHECK_FALSE(e.text.empty());
    (e.kind == OutputKind::reasoning ? result.reasoning : result.content) += e.text;
  }
  return result;
}

Split thinking(const std::string& output) {
  Split s = split(output, {true, false});
  s.reasoning_tokens = 0;
  return s;
}
std::string answer(const std::string& output, bool after_think = true) {
  const Split s = split(output, {false, after_think});
  CHECK(s.reasoning.empty());
  return s.content;
}

/// Shown text, and the index of the string found (-1: none), feeding `step` bytes at a time.
std::pair<std::string, int> stop(const std::vector<std::string>& strings, const std::string& text, size_t step,
                                 bool include = false) {
  StopMatcher matcher(strings, include);
  std::string out;
  for (size_t at = 0; at < text.size(); at += step) {
    if (const auto match = matcher.push(std::string_view(text).substr(at, step), out)) {
      return {out, static_cast<int>(match->string)};
    }
  }
  const auto match = matcher.finish(out);
  return {out, match ? static_cast<int>(match->string) : -1};
}

/// The same by looking at the whole text.
std::pair<std::string, int> stop_whole(const std::vector<std::string>& strings, const std::string& text) {
  size_t best = std::string::npos;
  int which = -1;
  for (size_t i = 0; i < strings.size(); ++i) {
    const size_t at = text.find(strings[i]);
    if (at < best) {
      best = at;
      which = static_cast<int>(i);
    }
  }
  return {text.substr(0, best), which};
}

}  // namespace

TEST_CASE("reasoning and content") {
  CHECK(thinking("Simple.</think>\n\nHi there<|user|>") == Split{"Simple.", "Hi there"});
  CHECK(thinking("</think>Hi") == Split{"", "Hi"});
  CHECK(thinking("all thought\n") == Split{"all thought\n", ""});
  CHECK(thinking("</think>A<think>B</think>C") == Split{"B", "AC"});
  CHECK(thinking("a<think>b</think>c</think>d") == Split{"ab", "cd"});
  CHECK(thinking("</think>\n\n") == Split{"", ""});
  CHECK(thinking("x</think>A \n<think>y") == Split{"xy", "A \n"});
  CHECK(thinking("t</think>use <tool_call> tags") == Split{"t", "use <tool_call> tags"});
  CHECK(thinking("a<|assistant|>b</think>c<|endoftext|>") == Split{"ab", "c"});
}

TEST_CASE("without an open think block everything is content") {
  CHECK(answer("Hello") == "Hello");
  CHECK(answer("\n\nHi") == "Hi");
  CHECK(answer(" world", false) == " world");
  CHECK(answer(" \n", false) == "");
  CHECK(answer("a <think>b</think> c") == "a <think>b c");
  CHECK(answer("say \xF0\x9F\x98\x80") == "say \xF0\x9F\x98\x80");
}

TEST_CASE("reasoning tokens exclude the tags") {
  const size_t n = tiny().encode("one two three").size();
  CHECK(split("one two three</think>four", {true, false}).reasoning_tokens == static_cast<int64_t>(n));
}

TEST_CASE("the start state comes from the prompt") {
  const auto start = [](const std::string& prompt, bool continues) {
    return output_start(tiny(), tiny().encode(prompt), continues);
  };
  CHECK(start("<|user|>x<|assistant|><think>", false).reasoning);
  CHECK_FALSE(start("<|user|>x<|assistant|><think></think>", false).reasoning);
  CHECK(start("<|user|>x<|assistant|><think></think>", false).after_think);
  CHECK_FALSE(start("<|user|><think>x", false).reasoning);
  CHECK(start("<|assistant|><think>so far", true).reasoning);
  CHECK_FALSE(start("<|assistant|><think>a</think>b", true).reasoning);
  CHECK_FALSE(start("<|assistant|><think>a</think>b", true).after_think);
  CHECK(start("<|assistant|><think>a</think>", true).after_think);
  CHECK_FALSE(start("<|user|><think>b<|assistant|>x", true).reasoning);
  CHECK_FALSE(start("", false).reasoning);
}

TEST_CASE("stop strings") {
  CHECK(stop({"END"}, "say END now", 1) == std::pair<std::string, int>{"say ", 0});
  CHECK(stop({"END"}, "say END now", 1, true) == std::pair<std::string, int>{"say END", 0});
  CHECK(stop({"END"}, "say EN", 2) == std::pair<std::string, int>{"say EN", -1});
  CHECK(stop({}, "text", 1) == std::pair<std::string, int>{"text", -1});
  // "abcd" begins first although "c" is complete first; if "abcd" does not come, "c" it is.
  CHECK(stop({"abcd", "c"}, "xabcdx", 1) == std::pair<std::string, int>{"x", 0});
  CHECK(stop({"abcd", "c"}, "xabcex", 1) == std::pair<std::string, int>{"xab", 1});
  CHECK(stop({"abcd", "c"}, "xabc", 1) == std::pair<std::string, int>{"xab", 1});
  CHECK(stop({"abc", "ab"}, "xabcx", 1).second == 0);
  CHECK(stop({"ab", "abc"}, "xabcx", 1).second == 0);
}

TEST_CASE("stop strings found do not depend on how the text is cut") {
  std::mt19937 random(17);
  const auto word = [&](size_t longest) {
    std::string s;
    for (size_t n = 1 + random() % longest; n > 0; --n) s += static_cast<char>('a' + random() % 2);
    return s;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> strings;
    for (size_t n = 1 + random() % 3; n > 0; --n) strings.push_back(word(5) + (random() % 2 ? "c" : ""));
    const std::string text = word(10) + (random() % 2 ? "c" : "") + word(6);
    const auto expected = stop_whole(strings, text);
    for (const size_t step : {1, 2, 3, 100}) REQUIRE(stop(strings, text, step) == expected);
  }
}

TEST_CASE("text passed unsearched cannot begin a stop string") {
  StopMatcher matcher({"END"});
  std::string out;
  matcher.pass("EN", out);
  CHECK(out == "EN");
  CHECK_FALSE(matcher.push("D and EN", out).has_value());
  CHECK(out == "END and ");
  const auto match = matcher.push("D", out);
  REQUIRE(match.has_value());
  CHECK(match->begin == 8);
  CHECK(out == "END and ");
}

TEST_CASE("too many, empty and huge stop strings are refused") {
  CHECK_THROWS_WITH_AS(StopMatcher(std::vector<std::string>(10000, "x")), doctest::Contains("at most 64"), Error);
  CHECK_THROWS_AS(StopMatcher({""}), Error);
  CHECK_THROWS_AS(StopMatcher({std::string(5000, 'x')}), Error);
}
