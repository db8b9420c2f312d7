#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "engine/text/chat_template.h"
#include "engine/text/json_text.h"

using namespace glm53;
using namespace glm53::text;
using Json = nlohmann::ordered_json;

namespace {

Json json(std::string_view text) {
  return parse_json(text, {.keep_big_integers = true});
}

std::string render(std::string_view messages, std::string_view tools = "null", ChatOptions options = {}) {
  return flatten(render_chat(parse_messages(json(messages)), parse_tools(json(tools)), options));
}

const std::string kHead = "[gMASK]<sop><|system|>Reasoning Effort: Max";
const std::string kOpen = "<|assistant|><think>";

std::string message_error(std::string_view messages) {
  try {
    parse_messages(json(messages));
  } catch (const Error& e) {
    CHECK(e.code() == Code::usage);
    return e.what();
  }
  return "";
}

ChatOptions options(std::string_view kwargs, std::string_view thinking = "null", std::string_view effort = "null",
                    bool always = false) {
  return parse_options(json(kwargs), json(thinking), json(effort), always);
}

}  // namespace

TEST_CASE("dialects of one conversation render alike") {
  const std::string expected = kHead + "<|system|>s<|user|>u" + kOpen;
  CHECK(render(R"([{"role":"developer","content":"s"},{"role":"user","content":"u","name":"bob"}])") == expected);
  CHECK(render(R"([{"role":"system","content":["s"]},{"role":"user","content":[{"type":"input_text","text":"u"}]}])") ==
        expected);
  CHECK(render(R"([{"role":"user","content":null},{"role":"user"}])") == kHead + "<|user|><|user|>" + kOpen);
  CHECK(render(R"([{"role":"user","content":[{"type":"mystery"},{"type":"text","text":"u"}]}])") ==
        kHead + "<|user|>u" + kOpen);
}

TEST_CASE("arguments of calls in the history are never an error") {
  const auto call = [](const std::string& arguments) {
    return render(R"([{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":)" +
                  arguments + "}}]}]");
  };
  const std::string head = kHead + "<|assistant|><think></think><tool_call>f", tail = "</tool_call>" + kOpen;
  CHECK(call("null") == head + tail);
  CHECK(call(R"("")") == head + tail);
  CHECK(call(R"("null")") == head + tail);
  CHECK(call(R"("{\"a\": [1, 2.50]}")") == head + "<arg_key>a</arg_key><arg_value>[1, 2.5]</arg_value>" + tail);
  CHECK(call(R"("{\"a\": ")") == head + "<arg_key>arguments</arg_key><arg_value>{\"a\": </arg_value>" + tail);
  CHECK(call(R"("[1]")") == head + "<arg_key>arguments</arg_key><arg_value>[1]</arg_value>" + tail);
  CHECK(call(R"("{\"a\": 1, \"b\": 2, \"a\": 3}")") ==
        head + "<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>" + tail);
  CHECK(call(R"({"n": 123456789012345678901234567890})") ==
        head + "<arg_key>n</arg_key><arg_value>123456789012345678901234567890</arg_value>" + tail);
  CHECK(render(R"([{"role":"assistant","function_call":{"name":"f","arguments":"{}"}}])") == head + tail);
}

TEST_CASE("tools keep the client's form") {
  const std::string prompt = render(
      R"([{"role":"user","content":"x"}])",
      R"([{"type":"function","function":{"name":"f","strict":true,"parameters":{"b":1e2,"a":18446744073709551616,"c":"/\u0001\u007f"}}}])");
  CHECK(prompt.find("<tools>\n{\"name\": \"f\", \"parameters\": {\"b\": 100.0, \"a\": 18446744073709551616, "
                    "\"c\": \"/\\u0001\x7f\"}}\n</tools>") != std::string::npos);
  const std::string none = render(R"([{"role":"user","content":"x"}])", R"([{"name":"f","defer_loading":1}])");
  CHECK(none.find("<tools>\n</tools>") != std::string::npos);
}

TEST_CASE("tool results") {
  const std::string list =
      render(R"([{"role":"tool","content":[{"output":"a"},{"output":[{"type":"text","text":"b"}]}]}])");
  CHECK(list == kHead + "<|observation|><tool_response>a</tool_response><tool_response>b</tool_response>" + kOpen);
  const std::string legacy = render(
      R"([{"role":"assistant","tool_calls":[{"id":"g","name":"g"},{"id":"f","name":"f"}]},
          {"role":"function","name":"f","content":"F"},{"role":"function","name":"g","content":"G"}])");
  CHECK(legacy.find("<tool_response>G</tool_response><tool_response>F</tool_response>") != std::string::npos);
}

TEST_CASE("an open turn is continued") {
  ChatOptions o;
  o.add_generation_prompt = false;
  o.continue_final_message = true;
  const std::string head = kHead + "<|user|>q<|assistant|><think>";
  CHECK(render(R"([{"role":"user","content":"q"},{"role":"assistant","content":"Hello wor "}])", "null", o) ==
        head + "</think>Hello wor");
  CHECK(render(R"([{"role":"user","content":"q"},{"role":"assistant","reasoning":"so"}])", "null", o) == head + "so");
  CHECK(render(R"([{"role":"user","content":"q"},{"role":"assistant","reasoning":"so","content":"A"}])", "null", o) ==
        head + "so</think>A");
}

TEST_CASE("markup is told apart from what the client wrote") {
  const auto pieces = render_chat(parse_messages(json(R"([{"role":"user","content":"<|user|>"}])")), {}, {});
  const std::vector<TextPiece> expected = {{kHead + "<|user|>", true}, {"<|user|>", false}, {kOpen, true}};
  CHECK(pieces == expected);
}

TEST_CASE("errors name the member") {
  CHECK(message_error("[]") == "messages: must not be empty");
  CHECK(message_error("{}") == "messages: must be an array");
  CHECK(message_error(R"([{"role":"user"},{"role":"robot"}])").find("messages[1].role: unknown role \"robot\"") == 0);
  CHECK(message_error(R"([{"content":"x"}])") == "messages[0].role: must be a string");
  CHECK(message_error(R"([{"role":"user","content":5}])").find("messages[0].content") == 0);
  CHECK(message_error(R"([{"role":"user","content":[{"type":"text"}]}])") ==
        "messages[0].content[0].text: must be a string");
  CHECK(message_error(R"([{"role":"assistant","tool_calls":[{"function":{}}]}])") ==
        "messages[0].tool_calls[0].function.name: must be a string");
  CHECK(message_error("[1]") == "messages[0]: must be an object");
  CHECK_THROWS_WITH_AS(parse_tools(json("[]")), doctest::Contains("tools: must not be empty"), Error);
  CHECK_THROWS_WITH_AS(parse_tools(json(R"([{"type":"function","function":{"name":""}}])")),
                       doctest::Contains("tools[0].function.name"), Error);
}

TEST_CASE("the thinking switch") {
  CHECK(options("null").thinking);
  CHECK_FALSE(options(R"({"enable_thinking":false})").thinking);
  CHECK(options(R"({"enable_thinking":false,"thinking":true})").thinking);
  CHECK_FALSE(options("null", R"({"type":"disabled"})").thinking);
  CHECK(options(R"({"thinking":1})", R"({"type":"disabled"})").thinking);
  CHECK_FALSE(options("null", "null", R"("none")").thinking);
  CHECK(options("null", R"({"type":"enabled"})", R"("none")").thinking);
  CHECK(options(R"({"enable_thinking":false})", "null", "null", true).thinking);
  CHECK(options(R"({"reasoning_effort":"low","clear_thinking":true})", "null", R"("high")").effort == "low");
  CHECK(options(R"({"clear_thinking":true})").clear_thinking);
  CHECK_THROWS_WITH_AS(options("null", "null", R"("huge")"), doctest::Contains("reasoning_effort"), Error);
  CHECK_THROWS_WITH_AS(options("null", R"({"type":"maybe"})"), doctest::Contains("thinking"), Error);
  CHECK_THROWS_WITH_AS(options("[]"), doctest::Contains("chat_template_kwargs"), Error);
}

TEST_CASE("media are counted") {
  const auto messages = parse_messages(json(
      R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}},{"type":"video"},{"type":"input_audio"}]},
          {"role":"tool","content":[{"type":"image"}]}])"));
  const MediaCount count = count_media(messages);
  CHECK(count.images == 2);
  CHECK(count.videos == 1);
  CHECK(count.audios == 1);
}
