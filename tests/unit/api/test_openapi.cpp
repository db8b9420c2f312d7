// engine/api/openapi.json against the answers, whole and streamed, and against the routes.
#include <doctest/doctest.h>

#include "common/file.h"
#include "tests/openapi.h"
#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

constexpr int32_t kObservation = 2633;
constexpr const char* kCalled = "r</think>Hi <tool_call>ping</tool_call>";
constexpr const char* kMessage = R"("messages":[{"role":"user","content":"Hi"}])";

const Json& document() {
  static const Json kDocument =
      glm53::parse_json(glm53::read_file(std::string(GLM53_SOURCE_DIR) + "/engine/api/openapi.json"));
  return kDocument;
}

const Json& schema(const std::string& name) {
  return document()["components"]["schemas"].at(name);
}

std::string complaints(const Json& value, const Json& wanted) {
  return glm53::test::OpenApi(document()).complaints(value, wanted);
}

/// Holds an answer against what the document says of it.
void check(const glm53::HttpAnswer& answer, const std::string& path, const std::string& method, int status) {
  CAPTURE(path);
  CAPTURE(answer.body);
  REQUIRE(answer.status == status);
  const Json& responses = document()["paths"].at(path).at(method)["responses"];
  const std::string key = std::to_string(status);
  const Json& described = responses.contains(key) ? responses[key] : responses["default"];
  CHECK(complaints(glm53::parse_json(answer.body), described["content"]["application/json"]["schema"]) == "");
}

/// One request to the rank: body and answer as described, and 400 without a body's members.
void check_generation(RankedServer& served, const std::string& path, const std::string& body,
                      const std::string& output) {
  const Json request = Json::parse(body);
  const Json& content = document()["paths"].at(path)["post"]["requestBody"]["content"];
  CHECK(complaints(request, content["application/json"]["schema"]) == "");
  check(served.answer(path, request, output, kObservation), path, "post", 200);
  check(served.answer(path, request, output, -1), path, "post", 200);
  check(served.refused(path, Json::object()), path, "post", 400);
}

}  // namespace

TEST_CASE("openapi: served as it is, without a key") {
  const TempDir dir;
  glm53::write_file(dir / "keys", "a:sk-a\n", 0600);
  Server server(Overrides{{"api.key_file", dir / "keys"}});
  const glm53::HttpAnswer answer = server.get("/openapi.json");
  CHECK(answer.status == 200);
  CHECK(glm53::parse_json(answer.body) == document());
}

TEST_CASE("openapi: what generates") {
  RankedServer served;
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"ping"}}])";
  check_generation(served, "/v1/chat/completions", std::string("{") + kMessage + "," + tools + "}", kCalled);
  check_generation(served, "/v1/completions", R"({"prompt":"Hi","max_tokens":20})", "there");
  check_generation(served, "/v1/responses", R"({"input":"Hi","tools":[{"type":"function","name":"ping"}]})", kCalled);
  check_generation(served, "/v1/messages",
                   std::string(R"({"max_tokens":20,"tools":[{"name":"ping","input_schema":{}}],)") + kMessage + "}",
                   kCalled);
  const std::string streamed =
      std::string(R"({"stream":true,"stream_options":{"include_usage":true},)") + kMessage + "," + tools + "}";
  const auto chunks =
      events_of(served.answer("/v1/chat/completions", Json::parse(streamed), kCalled, kObservation).body);
  CHECK(chunks.size() > 4);
  for (const Json& chunk : chunks) CHECK(complaints(chunk, schema("ChatChunk")) == "");
}

TEST_CASE("openapi: what does not") {
  RankedServer served;
  for (const auto& [path, methods] : document()["paths"].items()) {
    if (methods.contains("get") && path.find('{') == std::string::npos && path != "/openapi.json")
      check(served.server().get(path), path, "get", 200);
  }
  check(served.server().get("/v1/models/glm53-tiny"), "/v1/models/{id}", "get", 200);
  check(served.server().get("/v1/models/other"), "/v1/models/{id}", "get", 404);
  const auto post = [&](const std::string& path, const std::string& body, int status) {
    check(served.refused(path, Json::parse(body)), path, "post", status);
  };
  post("/tokenize", R"({"prompt":"Hi","return_token_strs":true})", 200);
  post("/tokenize", std::string("{") + kMessage + "}", 200);
  post("/tokenize", "{}", 400);
  post("/detokenize", R"({"tokens":[1,2]})", 200);
  post("/v1/messages/count_tokens", std::string("{") + kMessage + "}", 200);
  post("/v1/messages/count_tokens", "{}", 400);
  post("/v1/embeddings", R"({"input":"x"})", 501);
}

TEST_CASE("openapi: every path is one that docs/api.md names") {
  const std::string page = glm53::read_file(std::string(GLM53_SOURCE_DIR) + "/docs/api.md");
  for (const auto& [path, methods] : document()["paths"].items()) {
    CAPTURE(path);
    for (const auto& [method, operation] : methods.items()) CHECK(operation.contains("summary"));
    const bool unsupported = path == "/v1/embeddings";
    CHECK((unsupported || page.find(path) != std::string::npos));
  }
}
