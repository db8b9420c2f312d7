// Members of requests: what is honoured, refused by name, ignored.
#include <doctest/doctest.h>

#include "engine/api/errors.h"
#include "tests/unit/api/fixture.h"

using namespace api_test;
using namespace glm53::api;

namespace {

Settings settings() {
  Settings s;
  s.model_names = {"glm53-tiny", "alias"};
  s.max_context = 100;
  s.sampling.top_p = 0.95f;
  s.eos = {2624, 2631, 2633};
  return s;
}

const Settings kSettings = settings();
RequestContext context() {
  return {kSettings, tiny(), 100};
}

ChatRequest chat(const std::string& members) {
  return parse_chat_request(glm53::parse_json(R"({"messages":[{"role":"user","content":"Hi"}])" +
                                              (members.empty() ? "" : "," + members) + "}"),
                            context());
}
CompletionRequest completion(const std::string& members) {
  return parse_completion_request(glm53::parse_json("{" + members + "}"), context());
}

/// "400 param" of the refusal; "ok" when accepted.
template <class Parse>
std::string outcome(Parse parse, const std::string& members) {
  try {
    parse(members);
    return "ok";
  } catch (const ApiError& e) {
    CHECK(std::string(e.what()).size() > 5);
    return std::to_string(e.status()) + " " + e.param();
  }
}

}  // namespace

TEST_CASE("chat members out of range or of a wrong type are refused by name") {
  const std::vector<std::pair<std::string, std::string>> table = {
      {R"("temperature":-0.1)", "400 temperature"},
      {R"("temperature":2.1)", "400 temperature"},
      {R"("temperature":"1")", "400 temperature"},
      {R"("temperature":true)", "400 temperature"},
      {R"("top_p":0)", "400 top_p"},
      {R"("top_p":1.01)", "400 top_p"},
      {R"("top_k":-2)", "400 top_k"},
      {R"("top_k":1.5)", "400 top_k"},
      {R"("min_p":2)", "400 min_p"},
      {R"("presence_penalty":3)", "400 presence_penalty"},
      {R"("frequency_penalty":-3)", "400 frequency_penalty"},
      {R"("repetition_penalty":0)", "400 repetition_penalty"},
      {R"("repetition_penalty":1e-6)", "400 repetition_penalty"},
      {R"("seed":1.5)", "400 seed"},
      {R"("seed":99999999999999999999)", "400 seed"},
      {R"("n":0)", "400 n"},
      {R"("n":65)", "400 n"},
      {R"("n":2,"temperature":0)", "400 n"},
      {R"("max_tokens":0)", "400 max_tokens"},
      {R"("max_completion_tokens":-5,"max_tokens":5)", "400 max_completion_tokens"},
      {R"("min_tokens":-1)", "400 min_tokens"},
      {R"("stop":[""])", "400 stop"},
      {R"("stop":5)", "400 stop"},
      {R"("stop":[5])", "400 stop"},
      {R"("stop_token_ids":[2688])", "400 stop_token_ids"},
      {R"("stop_token_ids":["a"])", "400 stop_token_ids"},
      {R"("allowed_token_ids":[])", "400 allowed_token_ids"},
      {R"("allowed_token_ids":[-1])", "400 allowed_token_ids"},
      {R"("logit_bias":{"x":1})", "400 logit_bias"},
      {R"("logit_bias":{"99999":1})", "400 logit_bias"},
      {R"("logit_bias":{"5":"1"})", "400 logit_bias"},
      {R"("top_logprobs":2)", "400 top_logprobs"},
      {R"("logprobs":true,"top_logprobs":21)", "400 top_logprobs"},
      {R"("logprobs":5)", "400 logprobs"},
      {R"("stream":"yes")", "400 stream"},
      {R"("stream_options":{})", "400 stream_options"},
      {R"("tools":[])", "400 tools"},
      {R"("tools":[{"type":"function"}])", "400 tools"},
      {R"("tool_choice":"auto")", "400 tool_choice"},
      {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}})",
       "400 tool_choice"},
      {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"function":{"name":"f"}})",
       "400 tool_choice"},
      {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required","ignore_eos":true)",
       "400 ignore_eos"},
      {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required","guided_choice":["a"])",
       "400 tool_choice"},
      {R"("guided_choice":[])", "400 guided_choice"},
      {R"("guided_choice":["a",""])", "400 guided_choice"},
      {R"("structured_outputs":{"choice":["a"],"json":{}})", "400 structured_outputs"},
      {R"("structured_outputs":{})", "400 structured_outputs"},
      {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"perhaps")", "400 tool_choice"},
      {R"("response_format":{"type":"json"})", "400 response_format"},
      {R"("response_format":{"type":"json_schema"})", "400 response_format"},
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"not":{}}}})",
       "400 response_format"},
      {R"("response_format":{"type":"json_object"},"guided_regex":"a")", "400 response_format"},
      {R"("response_format":{"type":"json_object"},"ignore_eos":true)", "400 ignore_eos"},
      {R"("response_format":"text")", "400 response_format"},
      {R"("structured_outputs":{"regex":"\\b"})", "400 structured_outputs"},
      {R"("structured_outputs":{"structural_tag":{}})", "400 structured_outputs"},
      {R"("guided_json":"{")", "400 guided_json"},
      {R"("guided_grammar":"x ::= y")", "400 guided_grammar"},
      {R"("guided_regex":7)", "400 guided_regex"},
      {R"("prompt_logprobs":1)", "400 prompt_logprobs"},
      {R"("thinking_token_budget":-2)", "400 thinking_token_budget"},
      {R"("bad_words":[""])", "400 bad_words"},
      {R"("bad_words":"x")", "400 bad_words"},
      {R"("use_beam_search":true)", "400 use_beam_search"},
      {R"("functions":[])", "400 functions"},
      {R"("chat_template":"x")", "400 chat_template"},
      {R"("priority":1001)", "400 priority"},
      {R"("cache_salt":"a@b")", "400 cache_salt"},
      {R"("cache_salt":"")", "400 cache_salt"},
      {R"("reasoning_effort":"much")", "400 reasoning_effort"},
      {R"("chat_template_kwargs":5)", "400 chat_template_kwargs"},
      {R"("continue_final_message":true)", "400 continue_final_message"},
      {R"("truncate_prompt_tokens":0)", "400 truncate_prompt_tokens"},
      {R"("model":"other")", "404 model"},
      {R"("model":5)", "400 model"},
      {R"("messages":[])", "400 messages"},
      {R"("messages":null)", "400 messages"},
      {R"("messages":[{"role":"robot","content":"x"}])", "400 messages"},
      {R"("messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])", "400 messages"},
      {R"("messages":[{"role":"user","content":[{"type":"input_audio"}]}])", "400 messages"},
  };
  for (const auto& [members, expected] : table) {
    CAPTURE(members);
    CHECK(outcome(chat, members) == expected);
  }
  CHECK_THROWS_AS(parse_chat_request(Json::array(), context()), ApiError);
}

TEST_CASE("chat members at their limits, null members and harmless values are accepted") {
  for (
      const char* members :
      {"",
       R"("temperature":0)",
       R"("temperature":2)",
       R"("top_p":1)",
       R"("top_k":-1)",
       R"("top_k":3.0)",
       R"("n":64)",
       R"("seed":-1)",
       R"("stop":"x")",
       R"("stop":null,"tools":null,"tool_choice":null,"seed":null,"logit_bias":null)",
       R"("tool_choice":"none")",
       R"("bad_words":[],"prompt_logprobs":null,"best_of":1,"modalities":["text"])",
       R"("thinking_token_budget":-1)",
       R"("model":"alias")",
       R"("model":null)",
       R"("response_format":{"type":"text"})",
       R"("user":"u","metadata":{},"store":false,"prompt_cache_key":"k")",
       R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","parallel_tool_calls":false)",
       R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required")",
       R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"f"}})",
       R"("structured_outputs":{"choice":["yes","no"]},"bad_words":["x"],"thinking_token_budget":0)"}) {
    CAPTURE(members);
    CHECK(outcome(chat, members) == "ok");
  }
}

TEST_CASE("chat members arrive in the sampling parameters") {
  const ChatRequest r = chat(
      R"("temperature":0.001,"top_k":7,"min_p":0.1,"presence_penalty":1,"frequency_penalty":-1,"repetition_penalty":1.5,
         "seed":42,"stop":["a","b"],"stop_token_ids":[5],"logit_bias":{"7":200},"allowed_token_ids":[1,2],"ignore_eos":true,
         "max_completion_tokens":9,"max_tokens":3,"min_tokens":2,"logprobs":true,"top_logprobs":4,"cache_salt":"s",
         "stream":true,"stream_options":{"include_usage":true},"reasoning_effort":"low","mystery":1,"another":null)");
  CHECK(r.sampling.temperature == 0.01f);  // raised
  CHECK(r.sampling.top_p == 0.95f);        // generation_config.json
  CHECK(r.sampling.top_k == 7);
  CHECK(r.sampling.presence == 1);
  CHECK(r.sampling.frequency == -1);
  CHECK(r.sampling.repetition == 1.5f);
  CHECK(r.seed == 42);
  CHECK(r.stop == std::vector<std::string>{"a", "b"});
  CHECK(r.sampling.stop_ids == std::vector<int32_t>{5});
  CHECK(r.sampling.bias == std::vector<std::pair<int32_t, float>>{{7, 100.0f}});  // clamped
  CHECK(r.sampling.allowed == std::vector<int32_t>{1, 2});
  CHECK(r.sampling.ignore_eos);
  CHECK(r.max_tokens == 9);
  CHECK(r.sampling.min_tokens == 2);
  CHECK(r.sampling.logprobs == 4);
  CHECK(r.salt == "s");
  CHECK(r.include_usage);
  CHECK(r.chat.effort == "low");
  CHECK(r.ignored == std::vector<std::string>{"mystery", "another"});
}

TEST_CASE("ten thousand stop strings are refused clearly") {
  std::string list;
  for (int i = 0; i < 10000; ++i) list += (i ? ",\"" : "\"") + std::to_string(i) + "\"";
  CHECK_THROWS_WITH_AS(chat("\"stop\":[" + list + "]"), doctest::Contains("10000 strings, at most 64"), ApiError);
}

TEST_CASE("completion members") {
  const std::vector<std::pair<std::string, std::string>> table = {
      {R"("prompt":"x")", "ok"},
      {R"("prompt":["x","y"],"n":2)", "ok"},
      {R"("prompt":[1,2,3])", "ok"},
      {R"("prompt":[[1],[2,3]])", "ok"},
      {R"("prompt":"x","max_tokens":0,"echo":true)", "ok"},
      {R"("prompt":"x","best_of":2,"n":2)", "ok"},
      {R"("prompt":"x","suffix":"")", "ok"},
      {"", "400 prompt"},
      {R"("prompt":"")", "400 prompt"},
      {R"("prompt":[])", "400 prompt"},
      {R"("prompt":[[]])", "400 prompt"},
      {R"("prompt":["a",""])", "400 prompt"},
      {R"("prompt":{})", "400 prompt"},
      {R"("prompt":[2687])", "400 prompt"},
      {R"("prompt":[-1])", "400 prompt"},
      {R"("prompt":[1,"a"])", "400 prompt"},
      {R"("prompt":"x","max_tokens":0)", "400 max_tokens"},
      {R"("prompt":"x","logprobs":true)", "400 logprobs"},
      {R"("prompt":"x","logprobs":21)", "400 logprobs"},
      {R"("prompt":"x","logprobs":1,"echo":true)", "400 logprobs"},
      {R"("prompt":"x","suffix":"y")", "400 suffix"},
      {R"("prompt":"x","best_of":3)", "400 best_of"},
      {R"("prompt":["a","b","c","d","e"],"n":64)", "400 n"},
  };
  for (const auto& [members, expected] : table) {
    CAPTURE(members);
    CHECK(outcome(completion, members) == expected);
  }
  CHECK(completion(R"("prompt":"x")").max_tokens == 16);
}

TEST_CASE("prompt and output must fit the context") {
  std::vector<int32_t> prompt(90, 1);
  GenerationRequest r;
  CHECK(fit(prompt, r, context()) == 10);
  r.max_tokens = 10;
  CHECK(fit(prompt, r, context()) == 10);
  r.max_tokens = 11;
  CHECK_THROWS_WITH_AS(fit(prompt, r, context()), doctest::Contains("maximum context length is 100 tokens"), ApiError);
  r.max_tokens.reset();
  std::vector<int32_t> full(100, 1);
  CHECK_THROWS_AS(fit(full, r, context()), ApiError);
  r.sampling.min_tokens = 11;
  CHECK_THROWS_WITH_AS(fit(prompt, r, context()), doctest::Contains("min_tokens"), ApiError);
}

TEST_CASE("truncation keeps the end, or the beginning") {
  GenerationRequest r;
  r.truncate = 2;
  std::vector<int32_t> prompt = {1, 2, 3, 4};
  fit(prompt, r, context());
  CHECK(prompt == std::vector<int32_t>{3, 4});
  prompt = {1, 2, 3, 4};
  r.truncate_right = true;
  fit(prompt, r, context());
  CHECK(prompt == std::vector<int32_t>{1, 2});
  prompt.assign(500, 7);
  r.truncate = -1;
  r.max_tokens = 20;
  CHECK(fit(prompt, r, context()) == 20);
  CHECK(prompt.size() == 80);
}

TEST_CASE("conversations branch before the first user turn and before the answer") {
  const auto ids =
      tiny().encode("[gMASK]<sop><|system|>s<|user|>a<|assistant|><think></think>b<|user|>c<|assistant|><think>");
  const auto points = branch_points(ids, tiny());
  REQUIRE(points.size() == 2);
  CHECK(ids[static_cast<size_t>(points[0])] == tiny().chat().user);
  CHECK(static_cast<size_t>(points[1]) == ids.size() - 2);
  CHECK(branch_points({}, tiny()).empty());
}

TEST_CASE("API keys") {
  const KeyRing keys("# comment\nplain-key\n\nalice: secret \n");
  CHECK(keys.check("Bearer plain-key") == "key1");
  CHECK(keys.check("bEARER secret") == "alice");
  CHECK_FALSE(keys.check("Bearer alice").has_value());
  CHECK_FALSE(keys.check("Bearer ").has_value());
  CHECK_FALSE(keys.check("Basic secret").has_value());
  CHECK_FALSE(keys.check("secret").has_value());
  CHECK_FALSE(keys.check("").has_value());
  CHECK_THROWS_AS(KeyRing("# nothing\n"), glm53::Error);
  CHECK_THROWS_AS(KeyRing("bob:\n"), glm53::Error);
  for (const char* path : {"/health", "/ready", "/version", "/ping"}) CHECK(is_open_path(path, false));
  for (const char* path : {"/v1/models", "/tokenize", "/load", "/metrics", "/healthx"})
    CHECK_FALSE(is_open_path(path, false));
  CHECK(is_open_path("/metrics", true));
}

TEST_CASE("what a request demands becomes rules on tokens") {
  const auto rules = [](const std::string& members, bool reasoning) {
    const ChatRequest r = chat(members);
    return token_rules(r, &r, reasoning, tiny());
  };
  const auto ids = [](const char* text) {
    std::string out;
    for (const int32_t id : tiny().encode(text)) out += " " + std::to_string(id);
    return out + "\n";
  };
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"get_time"}},{"name":"ping"}])";
  const std::string think = "reasoning\nthink_end" + ids("</think>");
  CHECK(rules("", true).empty());
  CHECK(rules(tools, true).empty());
  const std::string opens = "opens" + ids("<tool_call>");
  std::string markup;
  for (const char* tag : {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"})
    markup += (markup.empty() ? "" : ", ") + std::to_string(tiny().require(tag));
  const std::string time = R"({"name": "get_time", "parameters": null, "strict": false})";
  const std::string ping = R"({"name": "ping", "parameters": null, "strict": false})";
  const auto calls = [&](const std::string& many, const std::string& list) {
    return "grammar {\"calls\": \"" + many + "\", \"markup\": [" + markup + "], \"tools\": [" + list + "]}\n";
  };
  CHECK(rules(tools + R"(,"tool_choice":"required")", true) == opens + calls("many", time + ", " + ping) + think);
  CHECK(rules(tools + R"(,"tool_choice":"required","parallel_tool_calls":false)", false) ==
        opens + calls("one", time + ", " + ping));
  CHECK(rules(tools + R"(,"tool_choice":{"type":"function","function":{"name":"ping"}})", false) ==
        opens + calls("one", ping));
  const std::string strict = R"("tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{}}}])";
  const std::string f = R"({"name": "f", "parameters": {}, "strict": true})";
  CHECK(rules(strict, true) == opens + "within\n" + calls("one", f) + think);
  CHECK(rules(strict + R"(,"tool_choice":"none")", true).empty());
  CHECK(rules(R"("response_format":{"type":"json_object"})", false) ==
        "grammar {\"content\": {\"json_object\": true}, \"path\": \"response_format\"}\n");
  const std::string both = rules(tools + R"(,"guided_regex":"a")", false);
  CHECK(both.find("\"content\": {\"regex\": \"a\"}") != std::string::npos);
  CHECK(both.find("\"calls\": \"many\"") != std::string::npos);
  CHECK(rules(tools + R"(,"guided_choice":["yes"])", false) ==
        "choice" + ids("yes") + "alternative" + ids("<tool_call>"));
  CHECK(rules(R"("bad_words":["no"],"thinking_token_budget":7)", true) ==
        "bad" + ids("no") + "bad" + ids(" no") + "budget 7\n" + think);
  CHECK(rules(R"("thinking_token_budget":7)", false).empty());
}
