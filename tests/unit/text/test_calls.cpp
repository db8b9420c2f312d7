// Tool calls in outputs: every worked example of the output format, the faults other servers had, and any split.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/json.h"
#include "common/strings.h"
#include "engine/text/output_parser.h"
#include "tests/unit/text/tiny.h"

using namespace glm53;
using namespace glm53::text;

namespace {

using Ids = std::vector<int32_t>;

constexpr std::string_view kTools = R"([
 {"type":"function","function":{"name":"get_time","parameters":{"type":"object","properties":{"tz":{"type":"string"}}}}},
 {"type":"function","function":{"name":"add","parameters":{"type":"object","properties":{
   "a":{"type":"integer"},"b":{"type":"number"},"tags":{"type":"array"}}}}},
 {"type":"function","function":{"name":"ping"}}])";

std::shared_ptr<const ToolSet> tools(std::string_view json = kTools) {
  return std::make_shared<const ToolSet>(parse_tools(parse_json(json, {.keep_big_integers = true})));
}

struct Call {
  std::string name, arguments;
  bool operator==(const Call&) const = default;
};
struct Answer {
  std::string reasoning, content;
  std::vector<Call> calls;
  bool operator==(const Answer&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Answer& a) {
  out << "[" << a.reasoning << "|" << a.content;
  for (const Call& c : a.calls) out << "|" << c.name << " " << c.arguments;
  return out << "]";
}

/// An output as a model writes it. "~" makes the "<" behind it an ordinary token.
struct Output {
  const char* text;
  bool cut = false;
  OutputStart start = {true, false};
  bool with_tools = true, single = false;
};

/// Alternately ordinary bytes and single added tokens.
struct Piece {
  std::string text;
  int32_t token = -1;
};
std::vector<Piece> pieces(const Output& output, Ids* ids = nullptr) {
  std::vector<Piece> out;
  const auto add = [&](std::string_view part) {
    for (const int32_t id : tiny().encode(part)) {
      if (ids != nullptr) ids->push_back(id);
      if (tiny().is_added(id)) {
        out.push_back({{}, id});
      } else if (!out.empty() && out.back().token < 0) {
        out.back().text += tiny().bytes(id);
      } else {
        out.push_back({std::string(tiny().bytes(id)), -1});
      }
    }
  };
  std::string_view rest = output.text;
  for (size_t at = rest.find('~'); at != std::string_view::npos; at = rest.find('~')) {
    add(rest.substr(0, at));
    add(rest.substr(at + 1, 1));
    rest.remove_prefix(at + 2);
  }
  add(rest);
  return out;
}

Answer parse(const Ids& ids, const Output& output, const std::shared_ptr<const ToolSet>& set) {
  OutputParser parser(tiny(), output.start, {output.with_tools ? set : nullptr, output.single});
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) parser.push(id, events);
  parser.finish(output.cut, events);
  Answer answer;
  for (const OutputEvent& e : events) {
    REQUIRE_FALSE(e.text.empty());
    REQUIRE(valid_utf8(e.text));
    if (e.kind == OutputKind::reasoning) answer.reasoning += e.text;
    if (e.kind == OutputKind::content) answer.content += e.text;
    if (e.kind == OutputKind::call_name) {
      REQUIRE(e.call == static_cast<int>(answer.calls.size()));
      answer.calls.push_back({e.text, {}});
    }
    if (e.kind == OutputKind::call_arguments) {
      REQUIRE(e.call + 1 == static_cast<int>(answer.calls.size()));
      answer.calls.back().arguments += e.text;
    }
  }
  REQUIRE(parser.calls() == static_cast<int>(answer.calls.size()));
  return answer;
}

Answer parse(const Output& output, const std::shared_ptr<const ToolSet>& set = tools()) {
  Ids ids;
  pieces(output, &ids);
  return parse(ids, output, set);
}

struct Example {
  Output output;
  Answer answer;
};

#define T "</think><tool_call>get_time<arg_key>tz"

const std::vector<Example>& examples() {
  static const std::vector<Call> ping = {{"ping", "{}"}};
  const auto time = [](const char* arguments) { return std::vector<Call>{{"get_time", arguments}}; };
  const OutputStart off{false, true}, open{false, false};
  static const std::vector<Example> all = {
      {{"Simple.</think>\n\nHi there<|user|>"}, {"Simple.", "Hi there", {}}},
      {{"</think>Hi<|user|>"}, {"", "Hi", {}}},
      {{"r</think><tool_call>get_time<arg_key>tz</arg_key><arg_value>UTC</arg_value></tool_call><|observation|>"},
       {"r", "", time(R"({"tz": "UTC"})")}},
      {{"r</think><tool_call>ping</tool_call>"}, {"r", "", ping}},
      {{"r</think><tool_call>ping\n</tool_call>"}, {"r", "", ping}},
      {{"r</think><tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key><arg_value>2.0"
        "</arg_value><arg_key>tags</arg_key><arg_value>[\"x\",1]</arg_value></tool_call>"},
       {"r", "", {{"add", R"({"a": 3, "b": 2, "tags": ["x", 1]})"}}}},
      {{"</think><tool_call>add<arg_key>a</arg_key><arg_value>three</arg_value></tool_call>"},
       {"", "", {{"add", R"({"a": "three"})"}}}},
      {{T "</arg_key><arg_value>123</arg_value></tool_call>"}, {"", "", time(R"({"tz": "123"})")}},
      {{T "</arg_key><arg_value>  two\nlines </arg_value></tool_call>"}, {"", "", time(R"({"tz": "  two\nlines "})")}},
      {{"think <tool_call>ping</tool_call>"}, {"think ", "", ping}},
      {{"</think><tool_call>ping</tool_call><tool_call>get_time</tool_call>"},
       {"", "", {{"ping", "{}"}, {"get_time", "{}"}}}},
      {{"</think><tool_call>ping</tool_call><tool_call>get_time</tool_call>x", false, {true, false}, true, true},
       {"", "", ping}},
      {{"</think>Let me check.<tool_call>ping</tool_call>"}, {"", "Let me check.", ping}},
      {{"</think>\n\n<tool_call>ping</tool_call>"}, {"", "", ping}},
      {{"</think>use <tool_call> tags", false, {true, false}, false}, {"", "use <tool_call> tags", {}}},
      {{"still thinking", true}, {"still thinking", "", {}}},
      {{T "</arg_key><arg_value>Eur", true}, {"", "", time(R"({"tz": "Eur)")}},
      {{"</think><tool_call>nope</tool_call>"}, {"", "<tool_call>nope</tool_call>", {}}},
      {{"Hello", false, off}, {"", "Hello", {}}},
      {{T "</arg_key><arg_value>\xF0\x9F\x98\x80 \xC3\xA9\xE4\xBD\xA0</arg_value></tool_call>"},
       {"", "", time("{\"tz\": \"\xF0\x9F\x98\x80 \xC3\xA9\xE4\xBD\xA0\"}")}},
      {{T "</arg_key><arg_value>a\"b\\c\nd\x01\xC3\xA9</arg_value></tool_call>"},
       {"", "", time("{\"tz\": \"a\\\"b\\\\c\\nd\\u0001\xC3\xA9\"}")}},
      {{"</think>A<think>B</think>C"}, {"B", "AC", {}}},
      {{T "<arg_value>UTC</tool_call>"}, {"", "", time(R"({"tz": "UTC"})")}},
      {{T "</arg_key>\nUTC</arg_value></tool_call>"}, {"", "", time(R"({"tz": "UTC"})")}},
      {{T "</arg_key></tool_call>"}, {"", "", time("{}")}},
      {{T "</tool_call>"}, {"", "", time("{}")}},
      {{T "</arg_key><arg_value>a</think>b</arg_value></tool_call>"}, {"", "", time(R"({"tz": "a</think>b"})")}},
      {{T "</arg_key><arg_value>A</arg_value><arg_key>tz</arg_key><arg_value>B</arg_value></tool_call>"},
       {"", "", time(R"({"tz": "A"})")}},
      {{"</think>A\n<tool_call>ping</tool_call>\n<tool_call>ping</tool_call>\nB\n"},
       {"", "A\n\nB\n", {{"ping", "{}"}, {"ping", "{}"}}}},
      {{"</think>\n<tool_call>nope<arg_key>x</arg_key>", true}, {"", "<tool_call>nope<arg_key>x</arg_key>", {}}},
      {{"</think><tool_call>no", true}, {"", "", {}}},
      {{"</think><tool_call>ping", true}, {"", "", {}}},
      {{"</think><tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key><arg_value>2.", true},
       {"", "", {{"add", R"({"a": 3)"}}}},
      {{"\n\nHi", false, off}, {"", "Hi", {}}},
      {{" world", false, open}, {"", " world", {}}},
      {{"</think><tool_call>ping~</tool_call>"}, {"", "", ping}},
      {{T "</arg_key><arg_value>a~</arg_value>b</arg_value></tool_call>"},
       {"", "", time(R"({"tz": "a</arg_value>b"})")}},
      // Beyond the examples of the format: what its table and its principle of recovery say.
      {{"</think><tool_call>get_time~<arg_key>tz~</arg_key> ~<arg_value>x</arg_value>~</tool_call>after"},
       {"", "after", time(R"({"tz": "x"})")}},
      {{"</think><tool_call>get_time<arg_key>tz</arg_key><arg_value>open"}, {"", "", time(R"({"tz": "open"})")}},
      {{"</think><tool_call>ping<"}, {"", "<tool_call>ping<", {}}},
      {{"</think><tool_call>ping<tool_call>get_time<arg_key>tz</arg_key>~<x<tool_call>ping</tool_call>"},
       {"", "", {{"ping", "{}"}, {"get_time", R"({"tz": "<x"})"}, {"ping", "{}"}}}},
      {{"</think><tool_call></tool_call>x"}, {"", "<tool_call></tool_call>x", {}}},
      {{"</think>a<tool_call>nope<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> "
        "b<tool_call>ping</tool_call>"},
       {"", "a<tool_call>nope<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> b", ping}},
      {{"r<arg_key>s</tool_call>t</think>u</arg_value>v</think>w"}, {"rst", "uvw", {}}},
      {{"r<arg_key>s</think>t<|user|>", false, {true, false}, false}, {"r<arg_key>s", "t", {}}},
      {{"</think><tool_call>get_time<arg_value></think><arg_key>ignored</arg_key><arg_key>tz<arg_key>x</arg_key> "
        "<arg_value></arg_value> junk </tool_call>"},
       {"", "", {{"get_time", R"({"tzx": ""})"}}}},
      {{T "</arg_key><arg_value>a<|assistant|>b<|begin_of_box|>c</arg_value></tool_call>"},
       {"", "", time(R"({"tz": "ab<|begin_of_box|>c"})")}},
  };
  return all;
}

#undef T

std::string value(const std::string& schema, const std::string& raw) {
  const auto set = tools(R"([{"name":"f","parameters":{"$defs":{"n":{"type":"integer"},"loop":{"$ref":"#/$defs/loop"}},
      "properties":{"k":)" +
                         schema + "}}}]");
  const std::string out = set->value("f", "k", raw);
  CHECK_NOTHROW(parse_json(out, {.keep_big_integers = true}));
  return out;
}

}  // namespace

TEST_CASE("calls: every worked example") {
  for (const Example& example : examples()) {
    CAPTURE(example.output.text);
    CHECK(parse(example.output) == example.answer);
  }
}

TEST_CASE("calls: any split gives the same answer") {
  std::array<int32_t, 256> byte_tokens{};
  for (int32_t id = 0; id < tiny().size(); ++id) {
    const std::string_view bytes = tiny().bytes(id);
    if (!tiny().is_added(id) && bytes.size() == 1) byte_tokens[static_cast<unsigned char>(bytes[0])] = id;
  }
  std::mt19937 random(53);
  const auto set = tools();
  int splits = 0;
  for (const Example& example : examples()) {
    const std::vector<Piece> parts = pieces(example.output);
    for (int round = 0; round < 1200; ++round, ++splits) {
      Ids ids;
      const unsigned cuts = 1 + random() % 8;  // one fragment in so many bytes
      for (const Piece& part : parts) {
        if (part.token >= 0) ids.push_back(part.token);
        for (size_t at = 0; at < part.text.size();) {
          size_t end = at + 1;
          while (end < part.text.size() && random() % cuts != 0) ++end;
          const std::string fragment = part.text.substr(at, end - at);
          const Ids some = tiny().encode(fragment);
          const bool whole = valid_utf8(fragment) &&
                             std::none_of(some.begin(), some.end(), [](int32_t id) { return tiny().is_added(id); });
          if (whole) {
            ids.insert(ids.end(), some.begin(), some.end());
          } else {
            for (const char c : fragment) ids.push_back(byte_tokens[static_cast<unsigned char>(c)]);
          }
          at = end;
        }
      }
      const Answer answer = parse(ids, example.output, set);
      if (answer != example.answer) {
        CAPTURE(example.output.text);
        REQUIRE(answer == example.answer);
      }
    }
  }
  CHECK(splits >= 50000);
}

TEST_CASE("calls: values have the type of their schema") {
  CHECK(value(R"({"type":"integer"})", " -007 ") == "-7");
  CHECK(value(R"({"type":"integer"})", "123456789012345678901234567890") == "123456789012345678901234567890");
  CHECK(value(R"({"type":"number"})", "1.0") == "1");
  CHECK(value(R"({"type":"number"})", "-0.0") == "0");
  CHECK(value(R"({"type":"number"})", ".5") == "0.5");
  CHECK(value(R"({"type":"number"})", "5.") == "5");
  CHECK(value(R"({"type":"number"})", "1e400") == "\"1e400\"");
  CHECK(value(R"({"type":"number"})", "nan") == "\"nan\"");
  CHECK(value(R"({"type":"number"})", "0x10") == "\"0x10\"");
  CHECK(value(R"({"type":"bool"})", " True ") == "true");
  CHECK(value(R"({"type":"boolean"})", "0") == "false");
  CHECK(value(R"({"type":["string","null"]})", "NULL") == "null");
  CHECK(value(R"({"type":["string","integer"]})", "5") == "5");
  CHECK(value(R"({"enum":[1,"a"]})", "1") == "1");
  CHECK(value(R"({"const":true})", "true") == "true");
  CHECK(value(R"({"anyOf":[{"type":"integer"},{"type":"null"}]})", "null") == "null");
  CHECK(value(R"({"$ref":"#/$defs/n"})", "4") == "4");
  CHECK(value(R"({"$ref":"#/$defs/loop"})", "4") == "\"4\"");
  CHECK(value(R"({"properties":{"x":{"type":"number"}}})", R"({"x":"2.0","y":"2"})") == R"({"x": 2.0, "y": "2"})");
  CHECK(value(R"({"items":{"type":"integer"}})", R"(["1","b",2.0])") == R"([1, "b", 2.0])");
  CHECK(value(R"({"type":"array"})", "[1.0]") == "[1.0]");
  CHECK(value(R"({"type":"integer"})", R"({"a":1})") == R"({"a": 1})");
  CHECK(value(R"({"type":"object"})", "{broken") == "\"{broken\"");
  CHECK(value(R"({"type":"strange"})", "5") == "\"5\"");
  CHECK(value(R"({"type":"string"})", "[1]") == "\"[1]\"");
}

TEST_CASE("B01: a call before </think> ends the reasoning") {
  CHECK(parse({"hm <tool_call>ping</tool_call>"}) == Answer{"hm ", "", {{"ping", "{}"}}});
}

TEST_CASE("B03: a name is sent once and whole") {
  OutputParser parser(tiny(), {false, true}, {tools(), false});
  std::vector<OutputEvent> events;
  for (const int32_t id : tiny().encode("<tool_call>get_time")) parser.push(id, events);
  CHECK(events.empty());
  for (const int32_t id : tiny().encode("<arg_key>")) parser.push(id, events);
  REQUIRE(events.size() == 1);
  CHECK(events[0] == OutputEvent{OutputKind::call_name, "get_time", 0});
}

TEST_CASE("B04: a call without arguments has {}") {
  CHECK(parse({"</think><tool_call>ping</tool_call>"}).calls == std::vector<Call>{{"ping", "{}"}});
}

TEST_CASE("B13, B14: values are typed and never stripped") {
  CHECK(parse({"</think><tool_call>get_time<arg_key>tz</arg_key><arg_value>\t  x \n</arg_value></tool_call>"})
            .calls[0]
            .arguments == R"({"tz": "\t  x \n"})");
}

TEST_CASE("B16: without tools nothing of the text is lost or doubled") {
  const std::string text = "a < b <tool_call>x</tool_call> <arg_key>";
  CHECK(parse({text.c_str(), false, {false, true}, false}).content == text);
}
