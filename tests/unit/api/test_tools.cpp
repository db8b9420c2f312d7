// Tool calls through a whole API process: two rounds with results, streamed and not, by a client's eyes.
#include <doctest/doctest.h>

#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

constexpr const char* kTools = R"([
 {"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{
   "city":{"type":"string"},"days":{"type":"integer"}},"required":["city"]}}},
 {"type":"function","function":{"name":"ping"}}])";
constexpr const char* kTwoCalls =
    "Two things.</think>Let me look.<tool_call>weather<arg_key>city</arg_key><arg_value>Z\xC3\xBCrich</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>ping</tool_call>";
constexpr const char* kArguments = "{\"city\": \"Z\xC3\xBCrich\", \"days\": 3}";
constexpr int32_t kObservation = 2633;

/// The message of a chat answer.
struct Served : RankedServer {
  std::string ask(const Json& body, const std::string& output, int32_t stop_token, std::string* prompt = nullptr) {
    const glm53::HttpAnswer got = answer("/v1/chat/completions", body, output, stop_token, prompt);
    CHECK(got.status == 200);
    return got.body;
  }
  Json message(const Json& body, const std::string& output, const std::string& finish, int32_t stop_token = 2631) {
    const Json choice = glm53::parse_json(ask(body, output, stop_token))["choices"][0];
    CHECK(choice["finish_reason"] == finish);
    return choice["message"];
  }
};

Json question() {
  Json body;
  body["messages"] = Json::parse(R"([{"role":"user","content":"Weather?"}])");
  body["tools"] = Json::parse(kTools);
  return body;
}

}  // namespace

TEST_CASE("a round with tools: calls, their results, the answer") {
  Served served;
  Json body = question();
  const Json message = served.message(body, kTwoCalls, "tool_calls", kObservation);
  CHECK(message["content"] == "Let me look.");
  CHECK(message["reasoning_content"] == "Two things.");
  const Json& calls = message["tool_calls"];
  REQUIRE(calls.size() == 2);
  CHECK(calls[0]["function"] == Json({{"name", "weather"}, {"arguments", kArguments}}));
  CHECK(calls[1]["function"] == Json({{"name", "ping"}, {"arguments", "{}"}}));
  CHECK(calls[0]["id"] != calls[1]["id"]);

  // Back comes the message as it was given, with the results in the other order.
  body["messages"].push_back(message);
  body["messages"].push_back({{"role", "tool"}, {"tool_call_id", calls[1]["id"]}, {"content", "pong"}});
  body["messages"].push_back({{"role", "tool"}, {"tool_call_id", calls[0]["id"]}, {"content", "sunny"}});
  std::string prompt;
  const Json end = glm53::parse_json(served.ask(body, "I know.</think>Sunny.", 2631, &prompt))["choices"][0];
  CHECK(prompt.ends_with(std::string("<|assistant|><think>") + kTwoCalls +
                         "<|observation|><tool_response>sunny</tool_response><tool_response>pong</tool_response>"
                         "<|assistant|><think>"));
  CHECK(end["message"]["content"] == "Sunny.");
  CHECK(end["finish_reason"] == "stop");
  CHECK_FALSE(end["message"].contains("tool_calls"));
}

TEST_CASE("a streamed answer with calls is the whole answer in pieces") {
  Served served;
  Json body = question();
  body["stream"] = true;
  bool done = false;
  std::string content, finish;
  std::vector<Json> calls;
  for (const Json& event : events_of(served.ask(body, kTwoCalls, kObservation), &done)) {
    if (event["choices"].empty()) continue;
    const Json& choice = event["choices"][0];
    if (choice["finish_reason"].is_string()) finish = choice["finish_reason"];
    const Json& delta = choice["delta"];
    if (delta.contains("content") && delta["content"].is_string()) content += delta["content"].get<std::string>();
    if (!delta.contains("tool_calls")) continue;
    CHECK_FALSE(delta.contains("content"));
    for (const Json& piece : delta["tool_calls"]) {
      if (piece.contains("id")) calls.push_back(Json({{"name", piece["function"]["name"]}, {"arguments", ""}}));
      REQUIRE(piece["index"] == calls.size() - 1);
      const auto arguments = calls.back()["arguments"].get<std::string>();
      calls.back()["arguments"] = arguments + piece["function"]["arguments"].get<std::string>();
    }
  }
  CHECK(done);
  CHECK(content == "Let me look.");
  CHECK(finish == "tool_calls");
  REQUIRE(calls.size() == 2);
  CHECK(calls[0] == Json({{"name", "weather"}, {"arguments", kArguments}}));
  CHECK(calls[1] == Json({{"name", "ping"}, {"arguments", "{}"}}));
}

TEST_CASE("tool_choice none leaves calls as text; one call at a time; a limit cuts") {
  Served served;
  Json none = question();
  none["tool_choice"] = "none";
  const Json text = served.message(none, "r</think><tool_call>ping</tool_call>", "stop");
  CHECK(text["content"] == "<tool_call>ping</tool_call>");
  CHECK_FALSE(text.contains("tool_calls"));

  Json cut = question();
  const Json part =
      served.message(cut, "r</think><tool_call>weather<arg_key>city</arg_key><arg_value>Zu", "length", -1);
  CHECK(part["content"].is_null());
  CHECK(part["tool_calls"][0]["function"]["arguments"] == R"({"city": "Zu)");

  Json single = question();
  single["parallel_tool_calls"] = false;
  const Json first = served.message(single, kTwoCalls, "tool_calls", kObservation);
  REQUIRE(first["tool_calls"].size() == 1);
  CHECK(first["tool_calls"][0]["function"]["name"] == "weather");
}

TEST_CASE("B15: stop strings do not match in reasoning") {
  Served served;
  Json body = question();
  body["stop"] = "END";
  const Json message = served.message(body, "the END of it</think>Now END, or not", "stop", -1);
  CHECK(message["reasoning"] == "the END of it");
  CHECK(message["content"] == "Now ");
}
