// /v1/responses as OpenAI's newer clients use it, and the endpoints that are not served.
#include <doctest/doctest.h>

#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

constexpr const char* kPath = "/v1/responses";
constexpr int32_t kObservation = 2633;
constexpr const char* kTool = R"("tools":[{"type":"function","name":"weather","description":"Weather",
  "parameters":{"type":"object","properties":{"city":{"type":"string"}}},"strict":true}])";
constexpr const char* kCalled =
    "Two.</think>Look.<tool_call>weather<arg_key>city</arg_key><arg_value>Z\xC3\xBCrich</arg_value></tool_call>";

Json parse(const glm53::HttpAnswer& answer) {
  CHECK(answer.status == 200);
  return glm53::parse_json(answer.body);
}

}  // namespace

TEST_CASE("responses: a string in, reasoning and text out") {
  RankedServer served;
  std::string prompt;
  const glm53::HttpAnswer got =
      served.answer(kPath, Json::parse(R"({"input":"Hi","instructions":"Be terse.","max_output_tokens":50,
        "reasoning":{"effort":"low"},"metadata":{"a":"b"},"store":false,"nonsense":1})"),
                    "Simple.</think>\n\nHello", 2631, &prompt);
  const Json answer = parse(got);
  CHECK(prompt == "[gMASK]<sop><|system|>Reasoning Effort: Low<|system|>Be terse.<|user|>Hi<|assistant|><think>");
  CHECK(header(got, "x-glm53-ignored") == "nonsense");
  CHECK(served.submitted.sampling.max_tokens == 50);
  CHECK(answer["id"].get<std::string>().starts_with("resp_"));
  CHECK(answer["object"] == "response");
  CHECK(answer["status"] == "completed");
  CHECK(answer["incomplete_details"].is_null());
  CHECK(answer["metadata"] == Json({{"a", "b"}}));
  CHECK(answer["store"] == false);
  CHECK(answer["max_output_tokens"] == 50);
  REQUIRE(answer["output"].size() == 2);
  const Json& reasoning = answer["output"][0];
  CHECK(reasoning["type"] == "reasoning");
  CHECK(reasoning["summary"] == Json::array());
  CHECK(reasoning["content"] == Json::parse(R"([{"type":"reasoning_text","text":"Simple."}])"));
  const Json& message = answer["output"][1];
  CHECK(message["type"] == "message");
  CHECK(message["role"] == "assistant");
  CHECK(message["status"] == "completed");
  CHECK(message["content"][0]["type"] == "output_text");
  CHECK(message["content"][0]["text"] == "Hello");
  CHECK(message["content"][0]["annotations"] == Json::array());
  const Json& usage = answer["usage"];
  CHECK(usage["input_tokens"] == served.submitted.prompt.size());
  CHECK(usage["input_tokens_details"]["cached_tokens"] == 3);
  CHECK(usage["output_tokens_details"]["reasoning_tokens"] == tiny().encode("Simple.").size());
  CHECK(usage["total_tokens"] == usage["input_tokens"].get<int>() + usage["output_tokens"].get<int>());
}

TEST_CASE("responses: items of one turn are put together; unknown ones are skipped and named") {
  RankedServer served;
  std::string prompt;
  const glm53::HttpAnswer got = served.answer(kPath, Json::parse(std::string(R"({"input":[
    {"role":"developer","content":"Be terse."},
    {"type":"message","role":"user","content":[{"type":"input_text","text":"Weather?"}]},
    {"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"look it up"}],"encrypted_content":"zzz"},
    {"type":"message","role":"assistant","content":[{"type":"output_text","text":"Let me look.","annotations":[]}]},
    {"type":"function_call","call_id":"c1","name":"weather","arguments":"{\"city\":\"Rome\"}"},
    {"type":"function_call","call_id":"c2","name":"weather","arguments":"{\"city\":\"Oslo\"}"},
    {"type":"function_call_output","call_id":"c2","output":"snow"},
    {"type":"function_call_output","call_id":"c1","output":[{"type":"input_text","text":"sun"}]},
    {"type":"compaction_trigger","x":1}],)") + kTool + "}"),
                                              kCalled, kObservation, &prompt);
  CHECK(header(got, "x-glm53-ignored") == "input.compaction_trigger");
  CHECK(prompt.ends_with(
      "<|system|>Be terse.<|user|>Weather?<|assistant|><think>look it up</think>Let me look."
      "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
      "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
      "<|observation|><tool_response>sun</tool_response><tool_response>snow</tool_response><|assistant|><think>"));
  CHECK(prompt.find("{\"name\": \"weather\", \"description\": \"Weather\", \"parameters\": ") != std::string::npos);
  const Json answer = parse(got);
  REQUIRE(answer["output"].size() == 3);
  const Json& call = answer["output"][2];
  CHECK(call["type"] == "function_call");
  CHECK(call["name"] == "weather");
  CHECK(call["arguments"] == "{\"city\": \"Z\xC3\xBCrich\"}");
  CHECK(call["call_id"].get<std::string>().starts_with("call_"));
  CHECK(call["id"] != call["call_id"]);
}

TEST_CASE("B20: the events of a stream are numbered, nested, and end with the whole response; no markup in text") {
  RankedServer served;
  const glm53::HttpAnswer got = served.answer(
      kPath, Json::parse(std::string(R"({"input":"Weather?","stream":true,)") + kTool + "}"), kCalled, kObservation);
  CHECK(got.body.find("[DONE]") == std::string::npos);
  const auto events = named_events_of(got.body);
  std::vector<std::string> names;
  std::vector<Json> done;
  std::string text, arguments, reasoning, open;
  for (size_t i = 0; i < events.size(); ++i) {
    const auto& [name, event] = events[i];
    CHECK(event["type"] == name);
    CHECK(event["sequence_number"] == i);
    if (names.empty() || names.back() != name) names.push_back(name);
    if (name == "response.output_item.added") {
      CHECK(open.empty());
      CHECK(event["output_index"] == done.size());
      open = event["item"]["id"];
    } else if (event.contains("item_id")) {
      CHECK(event["item_id"] == open);
      CHECK(event["output_index"] == done.size());
    } else if (name == "response.output_item.done") {
      CHECK(event["item"]["id"] == open);
      done.push_back(event["item"]);
      open.clear();
    }
    if (name == "response.output_text.delta") text += event["delta"].get<std::string>();
    if (name == "response.reasoning_text.delta") reasoning += event["delta"].get<std::string>();
    if (name == "response.function_call_arguments.delta") arguments += event["delta"].get<std::string>();
  }
  CHECK(names == std::vector<std::string>{
                     "response.created", "response.in_progress", "response.output_item.added",
                     "response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.done",
                     "response.content_part.done", "response.output_item.done", "response.output_item.added",
                     "response.content_part.added", "response.output_text.delta", "response.output_text.done",
                     "response.content_part.done", "response.output_item.done", "response.output_item.added",
                     "response.function_call_arguments.delta", "response.function_call_arguments.done",
                     "response.output_item.done", "response.completed"});
  CHECK(reasoning == "Two.");
  CHECK(text == "Look.");
  CHECK(arguments == "{\"city\": \"Z\xC3\xBCrich\"}");
  const Json& whole = events.back().second["response"];
  CHECK(whole["status"] == "completed");
  CHECK(whole["output"] == Json(done));
  CHECK(whole["usage"]["input_tokens"] == served.submitted.prompt.size());
  CHECK(events.front().second["response"]["status"] == "in_progress");
}

TEST_CASE("responses: a limit makes it incomplete") {
  RankedServer served;
  const Json cut = parse(served.answer(kPath, Json::parse(R"({"input":"Hi"})"), "r</think>Hel", -1));
  CHECK(cut["status"] == "incomplete");
  CHECK(cut["incomplete_details"] == Json({{"reason", "max_output_tokens"}}));
  CHECK(cut["output"][0]["status"] == "completed");
  CHECK(cut["output"][1]["status"] == "incomplete");
  const auto events =
      named_events_of(served.answer(kPath, Json::parse(R"({"input":"Hi","stream":true})"), "r</think>Hel", -1).body);
  CHECK(events.back().first == "response.incomplete");
  CHECK(events.back().second["response"]["output"][1]["status"] == "incomplete");
}

TEST_CASE("responses: what is not kept or not served is refused by name") {
  RankedServer served;
  const auto param = [&](const char* body) {
    const glm53::HttpAnswer answer = served.refused(kPath, Json::parse(body));
    CHECK(answer.status == 400);
    return glm53::parse_json(answer.body)["error"]["param"];
  };
  CHECK(param(R"({})") == "input");
  CHECK(param(R"({"input":[]})") == "input");
  CHECK(param(R"({"input":"x","previous_response_id":"resp_1"})") == "previous_response_id");
  CHECK(param(R"({"input":"x","conversation":"conv_1"})") == "conversation");
  CHECK(param(R"({"input":"x","store":true})") == "store");
  CHECK(param(R"({"input":"x","background":true})") == "background");
  CHECK(param(R"({"input":"x","truncation":"auto"})") == "truncation");
  CHECK(param(R"({"input":[{"type":"item_reference","id":"x"}]})") == "input[0]");
  CHECK(param(R"({"input":[{"role":"user","content":[{"type":"input_file"}]}]})") == "input[0].content[0]");
  CHECK(param(R"({"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]})") == "messages");
  CHECK(param(R"({"input":"x","tool_choice":{"type":"file_search"}})") == "tool_choice");
  CHECK(served.server().get("/v1/responses/resp_1").status == 404);
}

TEST_CASE("endpoints that are not served say so, and that trying again is no use") {
  Server server;
  for (const char* path :
       {"/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/files", "/v1/batches"}) {
    CAPTURE(path);
    const glm53::HttpAnswer answer = server.post(path, R"({"input":"x"})");
    CHECK(answer.status == 501);
    CHECK(header(answer, "x-should-retry") == "false");
    const Json error = glm53::parse_json(answer.body)["error"];
    CHECK(error["type"] == "NotImplementedError");
    CHECK(error["message"].get<std::string>().starts_with("not supported"));
  }
}
