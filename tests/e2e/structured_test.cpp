// Structured output of the real engine at a high temperature, judged by Python's jsonschema.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/helpers.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

constexpr int kSamples = 20;

constexpr const char* kJudge = R"(
import json, sys
import jsonschema
wrong = 0
for line in open(sys.argv[1], encoding='utf-8'):
    case = json.loads(line)
    judge = jsonschema.Draft202012Validator(case['schema'])
    for text in case['texts']:
        try:
            judge.validate(json.loads(text))
        except Exception as e:
            wrong += 1
            print(case['name'], repr(text), str(e).split('\n')[0])
print('wrong:', wrong)
)";

Json ask(HttpClient& http, Json body) {
  body["model"] = "glm53-tiny";
  body["messages"] = {{{"role", "user"}, {"content", "Give me an example."}}};
  body["chat_template_kwargs"] = {{"enable_thinking", false}};
  const auto answer = http.request("POST", "/v1/chat/completions", dump(body));
  INFO(answer.body);
  REQUIRE(answer.status == 200);
  return parse_json(answer.body);
}

}  // namespace

TEST_CASE("structured output: 20 samples of every schema at temperature 1.5 are valid") {
  LocalCluster cluster(real_engine());
  cluster.up();
  HttpClient http(cluster.api_url());
  http.set_timeout(5s, 120s);
  std::string lines;
  for (const Json& c : parse_json(read_file(source_dir() + "/tests/unit/grammar/schemas.json"))) {
    CAPTURE(c["name"].get<std::string>());
    Json texts = Json::array();
    for (int seed = 1; seed <= 6 && texts.size() < kSamples; ++seed) {
      const Json answer = ask(
          http,
          {{"n", kSamples},
           {"temperature", 1.5},
           {"max_tokens", 120},
           {"seed", 1000 * seed},
           {"response_format", {{"type", "json_schema"}, {"json_schema", {{"name", "x"}, {"schema", c["schema"]}}}}}});
      for (const Json& choice : answer["choices"]) {
        if (choice["finish_reason"] == "stop" && texts.size() < kSamples) texts.push_back(choice["message"]["content"]);
      }
    }
    CHECK(texts.size() == kSamples);
    lines += dump({{"name", c["name"]}, {"schema", c["schema"]}, {"texts", texts}}) + "\n";
  }
  const std::string file = cluster.temp_dir() + "/texts.jsonl";
  write_file(file, lines, 0600);
  const auto judged = run_program({"/usr/bin/env", "python3", "-c", kJudge, file}, cluster.temp_dir());
  CHECK(judged.output == "wrong: 0\n");

  const Json regex = ask(http, {{"temperature", 1.5}, {"max_tokens", 60}, {"guided_regex", "[a-f]{3}-[0-9]{2}"}});
  const auto word = regex["choices"][0]["message"]["content"].get<std::string>();
  CHECK(word.size() == 6);
  CHECK(word[3] == '-');
  const auto refused = http.request(
      "POST", "/v1/chat/completions",
      R"({"messages":[{"role":"user","content":"x"}],"guided_json":{"properties":{"a":{"uniqueItems":true}}}})");
  CHECK(refused.status == 400);
  CHECK(contains(refused.body, "guided_json/properties/a"));
}
