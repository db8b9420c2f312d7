// Faults that other servers had in prompts and in plain output (those of calls: test_calls.cpp), by the names of the
// list.
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/json.h"
#include "common/strings.h"
#include "engine/text/chat_template.h"
#include "engine/text/json_text.h"
#include "engine/text/output_parser.h"
#include "tests/unit/text/tiny.h"

using namespace glm53;
using namespace glm53::text;

namespace {

using Ids = std::vector<int32_t>;

std::vector<TextPiece> prompt(std::string_view messages, std::string_view kwargs = "null") {
  const auto none = parse_json("null");
  return render_chat(parse_messages(parse_json(messages, {.keep_big_integers = true})), {},
                     parse_options(parse_json(kwargs), none, none, false));
}

/// A turn with one call of f, its members as given.
std::string turn(const std::string& arguments, const std::string& content = "\"\"") {
  return flatten(prompt(R"([{"role":"assistant","content":)" + content +
                        R"(,"tool_calls":[{"id":"c","function":{"name":"f","arguments":)" + arguments + "}}]}]"));
}

struct Shown {
  std::string reasoning, content;
  bool operator==(const Shown&) const = default;
};

/// Every event must be text that can be sent.
Shown shown(const Ids& ids, OutputStart start) {
  OutputParser parser(tiny(), start);
  Shown out;
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) parser.push(id, events);
  parser.finish(false, events);
  for (const OutputEvent& e : events) {
    CHECK(valid_utf8(e.text));
    CHECK(e.text.find("\xEF\xBF\xBD") == std::string::npos);
    (e.kind == OutputKind::reasoning ? out.reasoning : out.content) += e.text;
  }
  return out;
}

}  // namespace

TEST_CASE("B05: a content of null beside calls is empty, never a word") {
  CHECK(turn("{}", "null") == turn("{}"));
  CHECK(turn("{}", "null").find("None") == std::string::npos);
}

TEST_CASE("B06: arguments of null are no arguments") {
  for (const char* arguments : {"null", R"("null")", R"("")", R"("{}")"}) CHECK(turn(arguments) == turn("{}"));
}

TEST_CASE("B07: arguments given as a string render as the object they are") {
  CHECK(turn(R"("{\"a\": [1, {\"b\": \"c\"}], \"d\": \"e\"}")") == turn(R"({"a": [1, {"b": "c"}], "d": "e"})"));
  CHECK_NOTHROW(turn(R"("{\"a\": ")"));
}

TEST_CASE("B08: an output without </think> is reasoning, nothing of it is lost") {
  CHECK(shown(tiny().encode("The answer is 4.<|user|>"), {true, false}) == Shown{"The answer is 4.", ""});
}

TEST_CASE("B09: thinking off changes the prompt, and the prompt decides where the output begins") {
  const char* question = R"([{"role":"user","content":"q"}])";
  const auto start = [](const std::vector<TextPiece>& pieces) {
    return output_start(tiny(), tiny().encode(flatten(pieces)), false);
  };
  CHECK(start(prompt(question)).reasoning);
  const OutputStart off = start(prompt(question, R"({"enable_thinking":false})"));
  CHECK_FALSE(off.reasoning);
  CHECK(shown(tiny().encode("</think>Hello"), off) == Shown{"", "Hello"});
}

TEST_CASE("B23: tokens that end a turn are never shown") {
  for (const char* end : {"<|endoftext|>", "<|user|>", "<|observation|>"}) {
    CHECK(shown(tiny().encode(std::string("r</think>text") + end), {true, false}) == Shown{"r", "text"});
  }
}

TEST_CASE("B24: characters spread over tokens arrive whole") {
  const std::string text = "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x92\xBB \xE4\xBD\xA0\xE5\xA5\xBD \xC3\xA9";
  Ids ids;
  for (const char byte : text) {
    for (int32_t id = 0; id < tiny().size(); ++id) {
      if (!tiny().is_added(id) && tiny().bytes(id) == std::string_view(&byte, 1)) {
        ids.push_back(id);
        break;
      }
    }
  }
  REQUIRE(ids.size() == text.size());
  CHECK(shown(ids, {true, false}).reasoning == text);
  CHECK(shown(ids, {false, true}).content == text);
}

TEST_CASE("B29: an output that begins with </think> has no reasoning") {
  CHECK(shown(tiny().encode("</think>\n\nDone."), {true, false}) == Shown{"", "Done."});
}
