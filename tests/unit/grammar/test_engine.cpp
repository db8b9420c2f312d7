#include <random>

#include <doctest/doctest.h>

#include "common/file.h"
#include "tests/unit/grammar/grammars.h"

using namespace glm53;
using namespace glm53::grammar;

namespace {

Json all_schemas() {
  return parse_json(read_file(std::string(GLM53_SOURCE_DIR) + "/tests/unit/grammar/schemas.json"));
}

using Bits = std::vector<uint32_t>;
Bits mask_of(Engine& engine, Engine::Position at) {
  Bits bits((static_cast<size_t>(engine.vocabulary().size()) + 31) / 32);
  engine.mask(at, bits);
  return bits;
}
bool has(const Bits& bits, int32_t id) {
  return (bits[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}
std::vector<int32_t> ids_of(const Bits& bits) {
  std::vector<int32_t> out;
  for (int32_t id = 0; id < static_cast<int32_t>(bits.size() * 32); ++id)
    if (has(bits, id)) out.push_back(id);
  return out;
}

/// A text of the grammar: tokens at random, but its end as soon as it may come once it is long.
std::string sample(Engine& engine, std::mt19937& random, size_t length) {
  Engine::Position at = engine.start();
  std::string out;
  while (!engine.finished(at) && !(engine.complete(at) && (out.size() > length || random() % 4 == 0))) {
    const std::vector<int32_t> ids = ids_of(mask_of(engine, at));
    REQUIRE_FALSE(ids.empty());
    int32_t id = ids[random() % ids.size()];
    // Beyond the length, the token that ends strings, lists and objects where there is one.
    if (out.size() > length) {
      for (const int32_t end : ids) {
        const std::string_view text = engine.vocabulary().text(end);
        if (text == "\"" || text == "]" || text == "}") id = end;
      }
    }
    at = engine.after(at, id);
    REQUIRE(at != Engine::kDead);
    out += engine.vocabulary().text(id);
    if (out.size() > length + 4000) return {};
  }
  return out;
}

}  // namespace

TEST_CASE("masks: exactly the tokens whose bytes may come") {
  std::mt19937 random(1);
  for (const Json& c : all_schemas()) {
    CAPTURE(c["name"].get<std::string>());
    Engine engine = engine_of({{"content", {{"json", c["schema"]}}}});
    Engine other = engine_of({{"content", {{"json", c["schema"]}}}});  // remembers nothing of the masks
    for (const Json& text : c["good"]) {
      const auto good = text.get<std::string>();
      const size_t cut = random() % (good.size() + 1);
      const Engine::Position at = engine.after(engine.start(), good.substr(0, cut));
      const Engine::Position same = other.after(other.start(), good.substr(0, cut));
      const Bits bits = mask_of(engine, at);
      CHECK(mask_of(engine, at) == bits);
      for (int32_t id = 0; id < tiny().size(); ++id) {
        const bool may = !tiny().is_added(id) && other.after(same, tiny().bytes(id)) != Engine::kDead;
        if (may != has(bits, id))
          FAIL("token ", id, " \"", std::string(tiny().bytes(id)), "\" behind ", good.substr(0, cut));
      }
    }
  }
}

TEST_CASE("masks: whatever is chosen from them ends as JSON of the schema's type") {
  std::mt19937 random(2);
  int ended = 0;
  for (const Json& c : all_schemas()) {
    CAPTURE(c["name"].get<std::string>());
    Engine engine = engine_of({{"content", {{"json", c["schema"]}}}});
    for (int i = 0; i < 10; ++i) {
      const std::string text = sample(engine, random, 60);
      CAPTURE(text);
      if (text.empty()) continue;
      ++ended;
      CHECK_NOTHROW(parse_json(text));
      CHECK(accepts(engine, text));
      // A byte less or another one: never accepted and still not JSON.
      std::string damaged = text;
      damaged[random() % damaged.size()] = "\"{}[],:x0"[random() % 9];
      if (accepts(engine, damaged)) CHECK_NOTHROW(parse_json(damaged));
    }
  }
  CHECK(ended > 600);
}

TEST_CASE("positions: going back leaves everything as it was, and another engine knows them too") {
  std::mt19937 random(3);
  Engine engine = engine_of({{"content", {{"json_object", true}}}});
  const auto fresh = engine.fresh();
  Engine::Position at = engine.start();
  for (int step = 0; step < 300 && !engine.finished(at); ++step) {
    const Bits before = mask_of(engine, at);
    const bool complete = engine.complete(at);
    Engine::Position ahead = at;
    for (int draft = 0; draft < 5; ++draft) {
      const std::vector<int32_t> ids = ids_of(mask_of(engine, ahead));
      if (ids.empty()) break;
      ahead = engine.after(ahead, ids[random() % ids.size()]);
    }
    CHECK(mask_of(engine, at) == before);
    CHECK(engine.complete(at) == complete);
    const Engine::Position there = fresh->import(engine, at);
    CHECK(mask_of(*fresh, there) == before);
    CHECK(fresh->import(engine, at) == there);
    const std::vector<int32_t> ids = ids_of(before);
    at = engine.after(at, ids[random() % ids.size()]);
  }
}

TEST_CASE("positions: characters split between tokens, special tokens, the end") {
  Engine engine = engine_of({{"content", {{"json", {{"const", "\xC3\xA9"}}}}}});
  Engine::Position at = engine.after(engine.start(), "\"\xC3");
  CHECK(ids_of(mask_of(engine, at)).size() >= 1);
  for (const int32_t id : ids_of(mask_of(engine, at))) CHECK(tiny().bytes(id)[0] == '\xA9');
  CHECK_FALSE(engine.complete(at));
  at = engine.after(at, "\xA9\"");
  CHECK(engine.finished(at));
  CHECK(ids_of(mask_of(engine, at)).empty());
  CHECK(engine.after(at, "x") == Engine::kDead);
  Engine any = engine_of({{"content", {{"regex", "[^]*"}}}});
  for (int32_t id = 0; id < tiny().size(); ++id)
    if (tiny().is_added(id)) CHECK(any.after(any.start(), id) == Engine::kDead);
  CHECK(any.after(any.start(), -1) == Engine::kDead);
  CHECK(any.after(any.start(), 1 << 30) == Engine::kDead);
}

TEST_CASE("jump-forward: what must come is known") {
  Engine engine =
      engine_of(schema_demand(R"({"type":"object","properties":{"kind":{"const":"abcdefgh"}},"required":["kind"]})"));
  const Engine::Position at = engine.after(engine.start(), "{\"k");
  CHECK(engine.forced(at, 100) == "ind\":");
  CHECK(engine.forced(at, 2) == "in");
  const Engine::Position value = engine.after(at, "ind\":\"");
  CHECK(engine.forced(value, 100) == "abcdefgh\"");
  std::string joined;
  Engine::Position step = value;
  for (const int32_t id : engine.forced_tokens(value, 100)) {
    joined += tiny().bytes(id);
    step = engine.after(step, id);
    CHECK(step != Engine::kDead);
  }
  CHECK_FALSE(joined.empty());
  CHECK(std::string("abcdefgh\"").starts_with(joined));
  CHECK(engine.forced(engine.start(), 100) == "{");
}

TEST_CASE("calls: names, arguments in order, values typed by the schema") {
  const auto t = tiny().chat();
  const Json markup = {t.tool_call, t.tool_call_end, t.arg_key, t.arg_key_end, t.arg_value, t.arg_value_end};
  const Json parameters = parse_json(
      R"({"type":"object","properties":{"a":{"type":"integer"},"s":{"type":"string"},"e":{"enum":["x","y"]},"o":{"type":"array","items":{"type":"boolean"}}},"required":["a"]})");
  Json demand = {
      {"calls", "many"},
      {"markup", markup},
      {"tools", Json::array({{{"name", "add"}, {"parameters", parameters}, {"strict", true}}, {{"name", "ping"}}})}};
  const auto run = [&](const std::string& text) {
    Engine engine = engine_of(demand);
    Engine::Position at = engine.start();
    for (const int32_t id : tiny().encode(text)) at = engine.after(at, id);
    return engine.complete(at);
  };
  const std::string a = "<tool_call>add<arg_key>a</arg_key><arg_value>12</arg_value>";
  CHECK(run(a + "</tool_call>"));
  CHECK(run(a + "<arg_key>s</arg_key><arg_value>any \"text\"\n</arg_value></tool_call>"));
  CHECK(run(a + "<arg_key>e</arg_key><arg_value>y</arg_value><arg_key>o</arg_key><arg_value>[true, "
                "false]</arg_value></tool_call>"));
  CHECK(run(a + "</tool_call><tool_call>ping</tool_call>"));
  CHECK(run("<tool_call>ping<arg_key>free</arg_key><arg_value>x</arg_value></tool_call>"));
  for (const std::string& bad :
       {std::string("<tool_call>add</tool_call>"), a, a + "</tool_call>x", std::string("<tool_call>sub</tool_call>"),
        std::string("<tool_call>add<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"),
        a + "<arg_key>e</arg_key><arg_value>z</arg_value></tool_call>",
        a + "<arg_key>b</arg_key><arg_value>1</arg_value></tool_call>", std::string("text"), std::string()}) {
    CAPTURE(bad);
    CHECK_FALSE(run(bad));
  }
  demand["calls"] = "one";
  CHECK_FALSE(run(a + "</tool_call><tool_call>ping</tool_call>"));
  demand["content"] = {{"json_object", true}};
  CHECK(run("{}"));
  CHECK(run(a + "</tool_call>"));
  demand["tools"][0]["parameters"]["properties"]["a"] = {{"not", Json::object()}};
  CHECK(refusal(demand) == "tools: parameters of \"add\"/properties/a: \"not\" cannot be enforced");
  demand["tools"][0]["strict"] = false;
  CHECK(run("<tool_call>add<arg_key>q</arg_key><arg_value>x</arg_value></tool_call>"));
}
