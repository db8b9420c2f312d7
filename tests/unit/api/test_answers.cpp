// Choices and the JSON of answers, without a server.
#include <doctest/doctest.h>

#include "engine/api/response.h"
#include "tests/unit/api/fixture.h"

using namespace api_test;
using namespace glm53::api;
using glm53::text::OutputKind;

namespace {

wire::Delta delta(const std::string& text, const std::string& finish = "", int32_t stop_token = -1) {
  wire::Delta d;
  d.tokens = tiny().encode(text);
  for (size_t i = 0; i < d.tokens.size(); ++i)
    d.logprobs.push_back({-0.5f, {{d.tokens[i], -0.5f}, {1, -2.0f}, {2, -3.0f}}});
  d.finish = finish;
  d.stop_token = stop_token;
  return d;
}

struct Result {
  std::string reasoning, content;
  size_t scores = 0;
};

/// Feeds `d` in pieces of `step` tokens.
Result feed(Choice& choice, const wire::Delta& d, size_t step = 1000) {
  Result r;
  for (size_t at = 0; at < std::max<size_t>(d.tokens.size(), 1); at += step) {
    const size_t end = std::min(d.tokens.size(), at + step);
    wire::Delta part;
    const auto from = static_cast<std::ptrdiff_t>(at), to = static_cast<std::ptrdiff_t>(end);
    part.tokens.assign(d.tokens.begin() + from, d.tokens.begin() + to);
    if (!d.logprobs.empty()) part.logprobs.assign(d.logprobs.begin() + from, d.logprobs.begin() + to);
    if (end == d.tokens.size()) {
      part.finish = d.finish;
      part.stop_token = d.stop_token;
    }
    std::vector<ChoiceEvent> events;
    choice.consume(part, events);
    for (const ChoiceEvent& e : events) {
      (e.kind == OutputKind::reasoning ? r.reasoning : r.content) += e.text;
      r.scores += e.scores.size();
    }
  }
  r.scores += choice.take_rest().scores.size();
  return r;
}

ChoiceOptions thinking() {
  ChoiceOptions o;
  o.start.reasoning = true;
  o.primary_eos = 2624;
  return o;
}

}  // namespace

TEST_CASE("an answer does not depend on the number of tokens a step") {
  for (const size_t step : {1, 2, 4, 8, 1000}) {
    ChoiceOptions o = thinking();
    o.stop = {"END"};
    o.logprobs = true;
    Choice choice(tiny(), o);
    const wire::Delta d = delta("First END of thought</think>\n\nHello END there<|user|>", "stop", 2631);
    const Result r = feed(choice, d, step);
    CHECK(r.reasoning == "First END of thought");  // stop strings are not looked for in reasoning
    CHECK(r.content == "Hello ");
    CHECK(choice.finished());
    CHECK(choice.finish_reason() == "stop");
    CHECK(std::get<std::string>(choice.stop_reason()) == "END");
    CHECK(static_cast<int64_t>(r.scores) == choice.completion_tokens());
    REQUIRE(choice.cut().has_value());
    const auto kept = tiny().decode(std::span(d.tokens).first(*choice.cut()));
    CHECK(kept == "First END of thought</think>\n\nHello");
  }
}

TEST_CASE("the end token counts and is not shown; its id is the stop reason unless it is the primary one") {
  for (const bool sent : {true, false}) {
    Choice choice(tiny(), thinking());
    wire::Delta d = delta("a</think>b", "stop", 2631);
    const size_t n = d.tokens.size();
    if (sent) d.tokens.push_back(2631);
    d.logprobs.clear();
    CHECK(feed(choice, d).content == "b");
    CHECK(choice.completion_tokens() == static_cast<int64_t>(n) + 1);
    CHECK(std::get<int32_t>(choice.stop_reason()) == 2631);
  }
  Choice primary(tiny(), thinking());
  feed(primary, delta("x<|endoftext|>", "stop", 2624));
  CHECK(std::holds_alternative<std::monostate>(primary.stop_reason()));
  CHECK(primary.finish_reason() == "stop");
  Choice cut(tiny(), thinking());
  CHECK(feed(cut, delta("still thinking", "length")).reasoning == "still thinking");
  CHECK(cut.finish_reason() == "length");
}

TEST_CASE("a stop token of the request is shown on demand; text held back comes at the end") {
  ChoiceOptions o = thinking();
  o.start = {};
  const int32_t bang = tiny().encode("!").front();
  o.stop_ids = {bang};
  o.include_stop = true;
  Choice choice(tiny(), o);
  CHECK(feed(choice, delta("Hi!", "stop", bang)).content == "Hi!");
  CHECK(std::get<int32_t>(choice.stop_reason()) == bang);
  o.include_stop = false;
  o.stop = {"Hi there"};
  Choice held(tiny(), o);
  CHECK(feed(held, delta("Hi!", "stop", bang)).content == "Hi");
}

TEST_CASE("stop strings wait for min_tokens") {
  ChoiceOptions o = thinking();
  o.start = {};
  o.stop = {"a"};
  o.min_tokens = 100;
  Choice choice(tiny(), o);
  CHECK(feed(choice, delta("banana", "length")).content == "banana");
}

TEST_CASE("raw text keeps tags and hides special tokens") {
  ChoiceOptions o;
  o.parse = false;
  Choice choice(tiny(), o);
  CHECK(feed(choice, delta(" a<think>b</think><|user|>\xC3\xA9", "length")).content == " a<think>b</think>\xC3\xA9");
  o.skip_special = false;
  Choice shown(tiny(), o);
  CHECK(feed(shown, delta("a<|user|>", "length")).content == "a<|user|>");
}

TEST_CASE("reasoning can be hidden and is still counted") {
  ChoiceOptions o = thinking();
  o.reasoning = false;
  Choice choice(tiny(), o);
  const Result r = feed(choice, delta("one two</think>three", "length"));
  CHECK(r.reasoning.empty());
  CHECK(r.content == "three");
  CHECK(choice.reasoning_tokens() == static_cast<int64_t>(tiny().encode("one two").size()));
}

TEST_CASE("a whole chat answer") {
  AnswerHead head;
  head.id = "chatcmpl-x";
  head.model = "m";
  head.logprobs = true;
  head.top_logprobs = 2;
  const auto format = chat_format(head, tiny());
  ChoiceAnswer answer;
  answer.reasoning = "r";
  answer.finish_reason = "stop";
  answer.stop_reason = 2631;
  const int32_t part = tiny().encode("\xC3\xA9").front();  // half a character
  answer.scores.push_back({part, {-1.5f, {{1, -0.25f}, {2, -20000.0f}, {3, -30000.0f}}}});
  const Json body = glm53::parse_json(format->whole({answer}, {10, 5, 3, 2}));
  CHECK(body["object"] == "chat.completion");
  const Json& choice = body["choices"][0];
  CHECK(choice["message"]["content"].is_null());
  CHECK(choice["message"]["reasoning"] == "r");
  CHECK(choice["message"]["reasoning_content"] == "r");
  CHECK(choice["stop_reason"] == 2631);
  const Json& entry = choice["logprobs"]["content"][0];
  CHECK(entry["token"] == "\xEF\xBF\xBD");
  CHECK(entry["bytes"] == Json::array({0xC3}));
  CHECK(entry["top_logprobs"].size() == 2);
  CHECK(entry["top_logprobs"][1]["logprob"] == -9999.0);
  CHECK(body["usage"] ==
        glm53::parse_json(
            R"({"prompt_tokens":10,"completion_tokens":5,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":3},
          "completion_tokens_details":{"reasoning_tokens":2}})"));
}

TEST_CASE("stream events are single lines; usage is null until the end when asked for") {
  AnswerHead head;
  head.include_usage = true;
  for (const auto& format : {chat_format(head, tiny()), completion_format(head, tiny())}) {
    const std::string event = format->event(3, {OutputKind::content, "a\n\"b\"", {}, {}}, nullptr);
    CHECK(event.starts_with("data: {"));
    CHECK(event.ends_with("}\n\n"));
    CHECK(event.find('\n') == event.size() - 2);
    const Json json = events_of(event).front();
    CHECK(json["choices"][0]["index"] == 3);
    CHECK(json["usage"].is_null());
    CHECK(json.contains("usage"));
    const Json last = events_of(format->last({1, 2, 0, 0})).front();
    CHECK(last["choices"].empty());
    CHECK(last["usage"]["total_tokens"] == 3);
  }
  head.include_usage = false;
  CHECK_FALSE(events_of(chat_format(head, tiny())->begin(0, {})).front().contains("usage"));
}

TEST_CASE("completion log-probabilities count characters") {
  AnswerHead head;
  head.logprobs = true;
  head.top_logprobs = 1;
  const auto format = completion_format(head, tiny());
  ChoiceAnswer answer;
  answer.content = "Hello world";
  answer.finish_reason = "length";
  for (const int32_t id : tiny().encode("Hello world")) answer.scores.push_back({id, {-1.0f, {{id, -1.0f}}}});
  const Json logprobs = glm53::parse_json(format->whole({answer}, {}))["choices"][0]["logprobs"];
  size_t offset = 0;
  for (size_t i = 0; i < logprobs["tokens"].size(); ++i) {
    CHECK(logprobs["text_offset"][i] == offset);
    offset += logprobs["tokens"][i].get<std::string>().size();
    CHECK(logprobs["top_logprobs"][i].size() == 1);
  }
  CHECK(offset == answer.content.size());
}

namespace {

ChoiceOptions with_tools(bool single = false) {
  ChoiceOptions o = thinking();
  const Json list = glm53::parse_json(R"([{"name":"ping"},{"name":"say","parameters":{"properties":
      {"text":{"type":"string"},"loud":{"type":"boolean"}}}}])");
  o.calls = {std::make_shared<const glm53::text::ToolSet>(glm53::text::parse_tools(list)), single};
  return o;
}

constexpr const char* kSay =
    "r</think>Now.<tool_call>say<arg_key>text</arg_key><arg_value>a \"b\"</arg_value><arg_key>loud</arg_key>"
    "<arg_value>1</arg_value></tool_call><tool_call>ping</tool_call>";

}  // namespace

TEST_CASE("B02, B10, B12: tool_calls only with a call, and length always wins") {
  const auto reason = [](ChoiceOptions options, const std::string& text, const std::string& finish) {
    Choice choice(tiny(), std::move(options));
    feed(choice, delta(text, finish, finish == "stop" ? 2633 : -1));
    return choice.finish_reason();
  };
  CHECK(reason(with_tools(), kSay, "stop") == "tool_calls");
  CHECK(reason(with_tools(), "r</think>no call", "stop") == "stop");
  CHECK(reason(with_tools(), "r</think><tool_call>unknown</tool_call>", "stop") == "stop");
  CHECK(reason(with_tools(), kSay, "length") == "length");
  CHECK(reason(with_tools(), "r</think><tool_call>say<arg_key>text</arg_key><arg_value>a", "length") == "length");
  CHECK(reason(with_tools(), "r</think><tool_call>say<arg_key>text</arg_key><arg_value>a", "stop") == "tool_calls");
  ChoiceOptions named = with_tools(true);
  named.named_call = true;
  CHECK(reason(std::move(named), kSay, "stop") == "stop");
}

TEST_CASE("without parallel calls the answer ends with its first") {
  for (const size_t step : {1, 2, 4, 8, 1000}) {
    Choice choice(tiny(), with_tools(true));
    const wire::Delta d = delta(kSay, "length");
    feed(choice, d, step);
    CHECK(choice.finish_reason() == "tool_calls");
    REQUIRE(choice.cut().has_value());
    CHECK(tiny().decode(std::span(d.tokens).first(*choice.cut())).ends_with("1</arg_value></tool_call>"));
  }
}

TEST_CASE("stop strings are not looked for in calls, and nothing matches across one") {
  ChoiceOptions o = with_tools();
  o.stop = {"Now!", "b", ".!"};
  Choice choice(tiny(), o);
  CHECK(feed(choice, delta(std::string(kSay) + "!", "stop", 2633)).content.starts_with("Now."));
  CHECK(choice.finish_reason() == "tool_calls");
  CHECK(std::get<int32_t>(choice.stop_reason()) == 2633);
}

TEST_CASE("B17: a stream of calls says what the whole answer says, whatever the step") {
  for (const size_t step : {1, 2, 4, 8, 1000}) {
    Choice choice(tiny(), with_tools());
    const wire::Delta d = delta(kSay, "stop", 2633);
    const auto format = chat_format({}, tiny());
    std::vector<std::string> names, ids, arguments;
    for (size_t at = 0; at < d.tokens.size(); at += step) {
      const size_t end = std::min(d.tokens.size(), at + step);
      wire::Delta part;
      part.tokens.assign(d.tokens.begin() + static_cast<std::ptrdiff_t>(at),
                         d.tokens.begin() + static_cast<std::ptrdiff_t>(end));
      if (end == d.tokens.size()) part.finish = "stop";
      std::vector<ChoiceEvent> events;
      choice.consume(part, events);
      for (const ChoiceEvent& e : events) {
        const Json chunk = events_of(format->event(0, e, nullptr)).at(0)["choices"][0]["delta"];
        if (!chunk.contains("tool_calls")) continue;
        CHECK(chunk.size() == 1);
        const Json& call = chunk["tool_calls"][0];
        if (call.contains("id")) {
          CHECK(call["type"] == "function");
          CHECK(call["index"] == names.size());
          names.push_back(call["function"]["name"]);
          ids.push_back(call["id"]);
          arguments.emplace_back();
        }
        REQUIRE_FALSE(arguments.empty());
        arguments.back() += call["function"]["arguments"].get<std::string>();
      }
    }
    CHECK(names == std::vector<std::string>{"say", "ping"});
    CHECK(arguments == std::vector<std::string>{R"({"text": "a \"b\"", "loud": true})", "{}"});
    REQUIRE(ids.size() == 2);
    CHECK(ids[0] != ids[1]);
    CHECK(ids[0].starts_with("call_"));
    CHECK(ids[0].size() == 29);
  }
}

TEST_CASE("a whole answer with calls") {
  const auto format = chat_format({}, tiny());
  ChoiceAnswer answer;
  answer.finish_reason = "tool_calls";
  answer.calls = {{"call_1", "ping", "{}"}};
  const Json message = glm53::parse_json(format->whole({answer}, {}))["choices"][0]["message"];
  CHECK(message["content"].is_null());
  CHECK(message["tool_calls"] ==
        Json::parse(R"([{"id":"call_1","type":"function","function":{"name":"ping","arguments":"{}"}}])"));
  answer.calls.clear();
  CHECK_FALSE(glm53::parse_json(format->whole({answer}, {}))["choices"][0]["message"].contains("tool_calls"));
}
