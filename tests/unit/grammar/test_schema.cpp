#include <random>

#include <doctest/doctest.h>

#include "common/file.h"
#include "tests/unit/grammar/grammars.h"

using namespace glm53;
using namespace glm53::grammar;

TEST_CASE("schemas: what they accept and what not, byte by byte") {
  const Json cases = parse_json(read_file(std::string(GLM53_SOURCE_DIR) + "/tests/unit/grammar/schemas.json"));
  CHECK(cases.size() >= 60);
  for (const Json& c : cases) {
    CAPTURE(c["name"].get<std::string>());
    Engine engine = engine_of({{"content", {{"json", c["schema"]}}}});
    for (const Json& text : c["good"]) {
      CAPTURE(text.get<std::string>());
      CHECK(accepts(engine, text.get<std::string>()));
    }
    for (const Json& text : c["bad"]) {
      CAPTURE(text.get<std::string>());
      CHECK_FALSE(accepts(engine, text.get<std::string>()));
    }
  }
}

TEST_CASE("schemas: JSON without one") {
  Engine object = engine_of({{"content", {{"json_object", true}}}});
  for (const char* good : {"{}", "{\"a\": [1, {\"b\": null}], \"c\": \"\\ud83d\\ude00\\n\"}", "{\n  \"a\": 1\n}"})
    CHECK(accepts(object, good));
  for (const char* bad : {"", " {}", "[]", "{\"a\"}", "{\"a\":1,}", "{\"\\ud83d\":1}", "{} ", "{\"a\":\"\x01\"}"})
    CHECK_FALSE(accepts(object, bad));
  Engine any = engine_of(schema_demand("true"));
  for (const char* good : {"1", "null", "[]", "{}", "\"x\""}) CHECK(accepts(any, good));
  // Deep nesting ends at a limit, and can always be closed.
  Engine::Position at = any.start();
  size_t deep = 0;
  while (any.after(at, "[") != Engine::kDead) {
    at = any.after(at, "[");
    ++deep;
  }
  CHECK(deep > 100);
  CHECK(deep < 1000);
  CHECK(any.complete(any.after(at, std::string(deep, ']'))));
}

TEST_CASE("schemas: what cannot be enforced is refused by name and path") {
  struct Case {
    const char *schema, *says;
  };
  for (const Case& c : {
           Case{R"({"type":"object","properties":{"a":{"type":"array","uniqueItems":true}}})",
                "schema/properties/a: \"uniqueItems\""},
           {R"({"not":{"type":"null"}})", "schema: \"not\""},
           {R"({"if":{},"then":{}})", "\"if\""},
           {R"({"patternProperties":{"^a":{}}})", "\"patternProperties\""},
           {R"({"propertyNames":{"maxLength":2}})", "\"propertyNames\""},
           {R"({"type":"array","contains":{"type":"null"}})", "\"contains\""},
           {R"({"dependentRequired":{"a":["b"]}})", "\"dependentRequired\""},
           {R"({"unevaluatedProperties":false})", "\"unevaluatedProperties\""},
           {R"({"$dynamicRef":"#x"})", "\"$dynamicRef\""},
           {R"({"frobnicate":1})", "\"frobnicate\""},
           {R"({"type":"strin"})", "\"strin\""},
           {R"({"type":"string","format":"iri"})", "format \"iri\""},
           {R"~({"type":"string","pattern":"(?=a)"})~", "\"pattern\": regular expression, at byte 3: look-around"},
           {R"({"type":"string","maxLength":100000})", "\"maxLength\""},
           {R"({"type":"string","minLength":-1})", "\"minLength\""},
           {R"({"type":"string","pattern":"^a$","minLength":3})", "no finite text"},
           {R"({"type":"array","minItems":100000})", "\"minItems\""},
           {R"({"type":"number","multipleOf":0.1})", "\"multipleOf\""},
           {R"({"type":"object","minProperties":2})", "\"minProperties\""},
           {R"({"type":"object","properties":{"a":{},"b":{}},"maxProperties":1})", "\"maxProperties\""},
           {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "\"oneOf\": branches 0 and 1"},
           {R"({"oneOf":[{"type":"object"},{"type":"object"}]})", "\"oneOf\""},
           {R"({"allOf":[{"type":"string","pattern":"a"},{"pattern":"b"}]})", "\"pattern\""},
           {R"({"allOf":[{"type":"string"},{"type":"null"}]})", "no type"},
           {R"({"$ref":"other.json"})", "only references into the schema"},
           {R"({"$ref":"#/$defs/x"})", "points nowhere"},
           {R"({"$ref":"#name"})", "anchors"},
           {R"({"$ref":"#"})", "no finite text"},
           {R"({"properties":{"a":{"$ref":"#"}},"required":["a"]})", "no finite text"},
           {R"({"enum":[]})", "\"enum\""},
           {R"({"type":"integer","enum":["a"]})", "\"enum\""},
           {R"({"enum":[1,2],"minimum":2})", "\"minimum\" beside"},
           {R"({"type":"integer","minimum":5,"maximum":4})", "no finite text"},
           {R"({"required":["a"],"additionalProperties":false})", "no finite text"},
           {R"({"items":[{},{}]})", "prefixItems"},
           {R"(false)", "no finite text"},
           {R"(7)", "a schema must be"},
       }) {
    CAPTURE(c.schema);
    const std::string said = refusal(schema_demand(c.schema));
    CAPTURE(said);
    CHECK(said.find("schema") == 0);
    CHECK(said.find(c.says) != std::string::npos);
  }
}

TEST_CASE("schemas: hostile ones cost a bounded amount of work") {
  const auto repeat = [](const std::string& s, int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += s;
    return out;
  };
  std::vector<std::pair<std::string, std::string>> hostile;  // schema, what is said
  hostile.emplace_back(repeat("{\"type\":\"array\",\"items\":", 60) + "{}" + repeat("}", 60), "");
  hostile.emplace_back(repeat("{\"anyOf\":[", 63) + "{}" + repeat("]}", 63), "");
  hostile.emplace_back(repeat("{\"anyOf\":[", 70) + "{}" + repeat("]}", 70), "deep");
  {
    std::string defs;  // each twice the one before
    for (int i = 0; i < 20; ++i) {
      const std::string next = "{\"$ref\":\"#/$defs/d" + std::to_string(i + 1) + "\",\"title\":\"x\"}";
      defs += "\"d" + std::to_string(i) + "\":{\"allOf\":[" + next + "," + next + "]},";
    }
    hostile.emplace_back(
        "{\"$defs\":{" + defs + "\"d20\":{\"type\":\"object\"}},\"$ref\":\"#/$defs/d0\",\"type\":\"object\"}",
        "too large");
    std::string any;
    for (int i = 0; i < 40; ++i) {
      const std::string next = "{\"$ref\":\"#/$defs/d" + std::to_string(i + 1) + "\",\"minLength\":1}";
      any += "\"d" + std::to_string(i) + "\":{\"anyOf\":[" + next + "," + next + "]},";
    }
    hostile.emplace_back("{\"$defs\":{" + any + "\"d40\":{\"type\":\"string\"}},\"$ref\":\"#/$defs/d0\"}", "");
  }
  hostile.emplace_back(R"({"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}},"$ref":"#/$defs/a"})",
                       "deep");
  std::string values;
  for (int i = 0; i < 20000; ++i)
    values += (i == 0 ? "\"value number " : ",\"value number ") + std::to_string(i) + "\"";
  hostile.emplace_back("{\"enum\":[" + values + "]}", "");
  hostile.emplace_back(R"({"type":"string","pattern":"^((a{0,90}){0,90}){0,90}$"})", "too large");
  hostile.emplace_back(R"({"type":"string","pattern":"(.*a){30}.{30}b","maxLength":4000})", "too large");
  hostile.emplace_back(R"({"type":"string","pattern":"[ab]*a[ab]{30}","minLength":1})", "too large");
  hostile.emplace_back(
      R"({"type":"array","maxItems":8000,"items":{"type":"array","maxItems":8000,"items":{"type":"string","maxLength":8000}}})",
      "too large");
  for (const auto& [schema, says] : hostile) {
    CAPTURE(schema.substr(0, 100));
    Budget budget;
    std::string said;
    try {
      compile(dump(schema_demand(schema)), budget);
    } catch (const Error& e) {
      said = e.what();
    }
    CAPTURE(said);
    CAPTURE(budget.used());
    CHECK(budget.used() <= budget.limits().work + budget.limits().text);
    if (!says.empty()) CHECK(said.find(says) != std::string::npos);
  }
}
