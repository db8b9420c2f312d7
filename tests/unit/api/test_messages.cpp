// /v1/messages as Anthropic's clients use it.
#include <doctest/doctest.h>

#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

constexpr const char* kPath = "/v1/messages";
constexpr int32_t kObservation = 2633;

Json body_of(const std::string& messages, const std::string& more = "{}") {
  Json body = Json::parse(more);
  body["model"] = "glm53-tiny";
  body["max_tokens"] = 200;
  body["messages"] = Json::parse(messages);
  return body;
}

constexpr const char* kHello = R"([{"role":"user","content":"Hello!"}])";
constexpr const char* kTools = R"({"tools":[
  {"name":"weather","description":"Weather","input_schema":{"type":"object","properties":{"city":{"type":"string"}}}},
  {"type":"custom","name":"ping","input_schema":{"type":"object"},"cache_control":{"type":"ephemeral"}}]})";

Json error_of(const glm53::HttpAnswer& answer, int status, const std::string& type) {
  CHECK(answer.status == status);
  const Json body = glm53::parse_json(answer.body);
  CHECK(body["type"] == "error");
  CHECK(body["error"]["type"] == type);
  return body["error"];
}

}  // namespace

TEST_CASE("messages: thinking, text, usage, and who says what in the prompt") {
  RankedServer served;
  const Json body = body_of(R"([
    {"role":"user","content":[{"type":"text","text":"2+2?","cache_control":{"type":"ephemeral"}}]},
    {"role":"assistant","content":[{"type":"thinking","thinking":"add","signature":"x"},
      {"type":"redacted_thinking","data":"zzz"},{"type":"text","text":"4"}]},
    {"role":"user","content":"3+3?"}])",
                            R"({"system":[{"type":"text","text":"Be "},{"type":"text","text":"terse."}],
                                "metadata":{"user_id":"u"},"nonsense":1})");
  std::string prompt;
  const glm53::HttpAnswer got = served.answer(kPath, body, "Simple.</think>\n\n6", 2631, &prompt);
  REQUIRE(got.status == 200);
  CHECK(prompt ==
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|system|>Be terse.<|user|>2+2?<|assistant|><think>add</think>4"
        "<|user|>3+3?<|assistant|><think>");
  CHECK(header(got, "x-glm53-ignored") == "nonsense");
  const Json answer = glm53::parse_json(got.body);
  CHECK(answer["id"].get<std::string>().starts_with("msg_"));
  CHECK(answer["type"] == "message");
  CHECK(answer["role"] == "assistant");
  CHECK(answer["model"] == "glm53-tiny");
  CHECK(answer["content"] == Json::parse(R"([{"type":"thinking","thinking":"Simple.","signature":""},
                                             {"type":"text","text":"6"}])"));
  CHECK(answer["stop_reason"] == "end_turn");
  CHECK(answer["stop_sequence"].is_null());
  CHECK(answer["usage"]["cache_read_input_tokens"] == 3);
  CHECK(answer["usage"]["input_tokens"] == served.submitted.prompt.size() - 3);
  CHECK(answer["usage"]["cache_creation_input_tokens"] == 0);
  CHECK(answer["usage"]["output_tokens"].get<int>() > 3);
}

TEST_CASE("messages: tools, their results before the user's text, and choices") {
  RankedServer served;
  const Json body = body_of(R"([
    {"role":"user","content":"Weather?"},
    {"role":"assistant","content":[{"type":"tool_use","id":"toolu_1","name":"weather","input":{"city":"Rome"}},
      {"type":"tool_use","id":"toolu_2","name":"ping","input":{}}]},
    {"role":"user","content":[{"type":"text","text":"And?"},
      {"type":"tool_result","tool_use_id":"toolu_2","content":[{"type":"text","text":"pong"}]},
      {"type":"tool_result","tool_use_id":"toolu_1","content":"sunny","is_error":false}]}])",
                            kTools);
  std::string prompt;
  const glm53::HttpAnswer got = served.answer(
      kPath, body, "r</think>Again.<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
      kObservation, &prompt);
  REQUIRE(got.status == 200);
  CHECK(prompt.find(R"({"name": "weather", "description": "Weather", "parameters": {"type": "object", )") !=
        std::string::npos);
  CHECK(
      prompt.ends_with("<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
                       "<tool_call>ping</tool_call><|observation|><tool_response>sunny</tool_response>"
                       "<tool_response>pong</tool_response><|user|>And?<|assistant|><think>"));
  const Json answer = glm53::parse_json(got.body);
  CHECK(answer["stop_reason"] == "tool_use");
  REQUIRE(answer["content"].size() == 3);
  CHECK(answer["content"][1] == Json({{"type", "text"}, {"text", "Again."}}));
  const Json& use = answer["content"][2];
  CHECK(use["type"] == "tool_use");
  CHECK(use["id"].get<std::string>().starts_with("toolu_"));
  CHECK(use["name"] == "weather");
  CHECK(use["input"] == Json({{"city", "Oslo"}}));

  Json any = body_of(kHello, kTools);
  any["tool_choice"] = {{"type", "any"}, {"disable_parallel_tool_use", true}};
  served.answer(kPath, any, "r</think><tool_call>ping</tool_call>", kObservation);
  const std::string one = served.submitted.grammar;
  CHECK_FALSE(one.empty());
  any["tool_choice"] = {{"type", "any"}};
  served.answer(kPath, any, "r</think><tool_call>ping</tool_call>", kObservation);
  CHECK_FALSE(served.submitted.grammar.empty());
  CHECK(served.submitted.grammar != one);
  Json named = body_of(kHello, kTools);
  named["tool_choice"] = {{"type", "tool"}, {"name", "ping"}};
  const Json forced =
      glm53::parse_json(served.answer(kPath, named, "r</think><tool_call>ping</tool_call>", kObservation).body);
  CHECK(forced["stop_reason"] == "tool_use");  // a block of it was sent
  Json none = body_of(kHello, kTools);
  none["tool_choice"] = {{"type", "none"}};
  const Json text =
      glm53::parse_json(served.answer(kPath, none, "r</think><tool_call>ping</tool_call>", kObservation).body);
  CHECK(text["stop_reason"] == "end_turn");
  CHECK(text["content"][1]["text"] == "<tool_call>ping</tool_call>");
}

TEST_CASE("messages: what ends an answer") {
  RankedServer served;
  const Json cut = glm53::parse_json(served.answer(kPath, body_of(kHello), "r</think>Hi", -1).body);
  CHECK(cut["stop_reason"] == "max_tokens");
  const Json stopped = glm53::parse_json(
      served.answer(kPath, body_of(kHello, R"({"stop_sequences":["END"]})"), "END</think>Hi END, or", -1).body);
  CHECK(stopped["stop_reason"] == "stop_sequence");
  CHECK(stopped["stop_sequence"] == "END");
  CHECK(stopped["content"][1]["text"] == "Hi ");
  const Json call = glm53::parse_json(
      served
          .answer(kPath, body_of(kHello, kTools), "</think><tool_call>weather<arg_key>city</arg_key><arg_value>Os", -1)
          .body);
  CHECK(call["stop_reason"] == "max_tokens");
  CHECK(call["content"][0]["input"] == Json::object());
}

TEST_CASE("messages: thinking off, a budget, an open turn that goes on") {
  RankedServer served;
  std::string prompt;
  served.answer(kPath, body_of(kHello, R"({"thinking":{"type":"disabled"}})"), "Hi", 2631, &prompt);
  CHECK(prompt.ends_with("<|assistant|><think></think>"));
  served.answer(kPath, body_of(kHello, R"({"thinking":{"type":"enabled","budget_tokens":1024}})"), "r</think>Hi", 2631);
  CHECK(served.submitted.grammar.find("budget 1024") != std::string::npos);
  const Json open = body_of(R"([{"role":"user","content":"Hello!"},{"role":"assistant","content":"Well,"}])");
  const Json answer = glm53::parse_json(served.answer(kPath, open, " hello", 2631, &prompt).body);
  CHECK(prompt.ends_with("<|assistant|><think></think>Well,"));
  CHECK(answer["content"] == Json::parse(R"([{"type":"text","text":" hello"}])"));
}

TEST_CASE("messages: the events of a stream, block by block") {
  RankedServer served;
  Json body = body_of(kHello, kTools);
  body["stream"] = true;
  const glm53::HttpAnswer got = served.answer(
      kPath, body,
      "Two.</think>Look.<tool_call>weather<arg_key>city</arg_key><arg_value>Z\xC3\xBCrich</arg_value></tool_call>"
      "<tool_call>ping</tool_call>",
      kObservation);
  REQUIRE(got.status == 200);
  CHECK(got.body.find("[DONE]") == std::string::npos);
  std::vector<Json> blocks;
  std::vector<std::string> text;
  std::string stop_reason;
  bool open = false, stopped = false;
  const auto events = named_events_of(got.body);
  REQUIRE(events.size() > 10);
  CHECK(events.front().first == "message_start");
  CHECK(events.front().second["message"]["content"] == Json::array());
  CHECK(events.front().second["message"]["usage"]["cache_read_input_tokens"] == 3);
  CHECK(events.front().second["message"]["usage"]["input_tokens"] == served.submitted.prompt.size() - 3);
  for (const auto& [name, event] : events) {
    CHECK(event["type"] == name);
    CHECK_FALSE(stopped);
    if (name == "content_block_start") {
      CHECK_FALSE(open);
      REQUIRE(event["index"] == blocks.size());
      blocks.push_back(event["content_block"]);
      text.emplace_back();
      open = true;
    } else if (name == "content_block_delta") {
      REQUIRE(open);
      CHECK(event["index"] == blocks.size() - 1);
      const Json& delta = event["delta"];
      const Json& type = blocks.back()["type"];
      if (type == "text") text.back() += delta["text"].get<std::string>();
      if (type == "tool_use") text.back() += delta["partial_json"].get<std::string>();
      if (type == "thinking" && delta["type"] == "thinking_delta") text.back() += delta["thinking"].get<std::string>();
    } else if (name == "content_block_stop") {
      CHECK(event["index"] == blocks.size() - 1);
      open = false;
    } else if (name == "message_delta") {
      stop_reason = event["delta"]["stop_reason"];
      CHECK(event["usage"]["output_tokens"].get<int>() > 10);
    } else if (name == "message_stop") {
      stopped = true;
    }
  }
  CHECK(stopped);
  CHECK(stop_reason == "tool_use");
  REQUIRE(blocks.size() == 4);
  CHECK(text == std::vector<std::string>{"Two.", "Look.", "{\"city\": \"Z\xC3\xBCrich\"}", "{}"});
  CHECK(blocks[2]["name"] == "weather");
  CHECK(blocks[3]["name"] == "ping");
  CHECK(blocks[2]["id"] != blocks[3]["id"]);
}

TEST_CASE("messages: a stream that the rank ends twice is ended by an error event") {
  RankedServer served;
  Json body = body_of(kHello);
  body["stream"] = true;
  auto got = std::async(std::launch::async, [&] { return served.server().post(kPath, glm53::dump(body)); });
  const wire::Submit s = served.rank().submitted();
  served.rank().tokens(s.id, 0, {tiny().encode("Hi").front()});
  wire::Delta failed;
  failed.id = s.id;
  failed.index = 1;
  failed.finish = "error";
  served.rank().send(failed);
  const auto events = named_events_of(got.get().body);
  REQUIRE_FALSE(events.empty());
  CHECK(events.back().first == "error");
  CHECK(events.back().second["error"]["type"] == "api_error");
}

TEST_CASE("messages: refusals in Anthropic's form") {
  RankedServer served;
  const auto refused = [&](const Json& body) {
    return error_of(served.refused(kPath, body), 400, "invalid_request_error")["message"].get<std::string>();
  };
  Json body = body_of(kHello);
  body.erase("max_tokens");
  CHECK(refused(body).starts_with("max_tokens: "));
  CHECK(refused(body_of("[]")).starts_with("messages: "));
  CHECK(refused(body_of(R"([{"role":"user","content":[{"type":"image","source":{"type":"url","url":"x"}}]}])"))
            .starts_with("messages[0].content[0]: image blocks are not supported"));
  CHECK(refused(body_of(R"([{"role":"user","content":[{"type":"document"}]}])")).find("document") != std::string::npos);
  CHECK(refused(body_of(R"([{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":
      [{"type":"image"}]}]}])"))
            .starts_with("messages[0].content[0].content[0]: image"));
  CHECK(refused(body_of(R"([{"role":"tool","content":"x"}])")).starts_with("messages[0].role"));
  CHECK(refused(body_of(kHello, R"({"temperature":1.5})")).starts_with("temperature: "));
  CHECK(refused(body_of(kHello, R"({"mcp_servers":[{"url":"x"}]})")).starts_with("mcp_servers: "));
  CHECK(refused(body_of(kHello, R"({"tools":[{"type":"web_search_20250305","name":"web_search"}]})"))
            .starts_with("tools[0].type"));
  CHECK(refused(body_of(kHello, R"({"thinking":{"type":"often"}})")).starts_with("thinking.type"));
  Json other = body_of(kHello);
  other["model"] = "claude";
  error_of(served.refused(kPath, other), 404, "not_found_error");
  error_of(served.server().get(kPath), 405, "invalid_request_error");
  error_of(served.refused("/v1/messages/batches", body_of(kHello)), 404, "not_found_error");
}

TEST_CASE("messages: count_tokens counts what the prompt would be") {
  RankedServer served;
  Json body = body_of(kHello, kTools);
  body.erase("max_tokens");
  const glm53::HttpAnswer got = served.refused("/v1/messages/count_tokens", body);
  REQUIRE(got.status == 200);
  body["max_tokens"] = 10;
  served.answer(kPath, body, "Hi", 2631);
  CHECK(glm53::parse_json(got.body) == Json({{"input_tokens", served.submitted.prompt.size()}}));
}

TEST_CASE("messages: a key may come as x-api-key, there only") {
  const TempDir dir;
  glm53::write_file(dir / "keys", "tester:sk-1\n", 0600);
  RankedServer served({{"api.key_file", dir / "keys"}, {"api.metrics_open", "true"}});
  const uint16_t port = served.server().port();
  const std::string count = glm53::dump(body_of(kHello));
  const std::string head = "Host: x\r\nContent-Type: application/json\r\n";
  CHECK(raw_request(port, "POST /v1/messages/count_tokens", head + "X-Api-Key: sk-1\r\n", count)
            .starts_with("HTTP/1.1 200"));
  const std::string wrong = raw_request(port, "POST /v1/messages/count_tokens", head + "x-api-key: sk-2\r\n", count);
  CHECK(wrong.starts_with("HTTP/1.1 401"));
  CHECK(wrong.find(R"("type":"authentication_error")") != std::string::npos);
  CHECK(raw_request(port, "POST /v1/messages/count_tokens", head + "Authorization: Bearer sk-1\r\n", count)
            .starts_with("HTTP/1.1 200"));
  CHECK(raw_request(port, "GET /v1/models", head + "x-api-key: sk-1\r\n", "").starts_with("HTTP/1.1 401"));
}
