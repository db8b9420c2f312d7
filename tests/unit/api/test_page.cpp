// The chat page as the API process serves it; what it does is tested in tests/page and tests/e2e.
#include <doctest/doctest.h>

#include "common/file.h"
#include "tests/unit/api/fixture.h"

using namespace api_test;

namespace {

constexpr const char* kFiles[] = {
    "/", "/page/chat.css", "/page/chat.mjs", "/page/markdown.mjs", "/page/stream.mjs", "/page/view.mjs"};

std::string source(const std::string& path) {
  return glm53::read_file(std::string(GLM53_SOURCE_DIR) + "/engine/api/page/" +
                          (path == "/" ? "index.html" : path.substr(6)));
}

}  // namespace

TEST_CASE("page: its files are served as they are, under a policy that lets nothing else in") {
  Server server;
  size_t bytes = 0;
  for (const std::string path : kFiles) {
    CAPTURE(path);
    const glm53::HttpAnswer answer = server.get(path);
    CHECK(answer.status == 200);
    CHECK(answer.body == source(path));
    bytes += answer.body.size();
    const std::string type = header(answer, "content-type");
    CHECK(type == (path == "/"              ? "text/html; charset=utf-8"
                   : path.ends_with(".css") ? "text/css; charset=utf-8"
                                            : "text/javascript; charset=utf-8"));
    const std::string policy = header(answer, "content-security-policy");
    CHECK(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"));
    CHECK(policy.find("frame-ancestors 'none'") != std::string::npos);
    CHECK(policy.find("require-trusted-types-for 'script'") != std::string::npos);
    CHECK(policy.find("unsafe") == std::string::npos);
    CHECK(policy.find("http") == std::string::npos);
    CHECK(header(answer, "x-content-type-options") == "nosniff");
    CHECK(header(answer, "cache-control") == "no-cache");
    // Nothing from elsewhere, nothing inline, no way from text to elements.
    for (const char* never : {"http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                              "eval(", "new Function", "<style", " style=", " onclick=", " onload="}) {
      CAPTURE(never);
      CHECK(answer.body.find(never) == std::string::npos);
    }
  }
  CHECK(bytes < 60'000);
}

TEST_CASE("page: HEAD has the headers without the text, other methods are refused") {
  Server server;
  const glm53::HttpAnswer head = glm53::HttpClient(server.url()).request("HEAD", "/");
  CHECK(head.status == 200);
  CHECK(head.body.empty());
  CHECK(header(head, "content-type") == "text/html; charset=utf-8");
  CHECK(header(head, "content-security-policy").starts_with("default-src 'none'"));
  CHECK(server.post("/", "{}").status == 405);
}

TEST_CASE("page: unknown paths are answered by the API") {
  Server server;
  for (const char* path :
       {"/index.html", "/page", "/page/", "/page/other.mjs", "/page/../chat.mjs", "/favicon.ico", "/v2"}) {
    CAPTURE(path);
    const glm53::HttpAnswer answer = server.get(path);
    CHECK(answer.status == 404);
    CHECK(glm53::parse_json(answer.body)["error"]["code"] == 404);
  }
}

TEST_CASE("page: it needs no key, what it asks does") {
  TempDir dir;
  glm53::write_file(dir / "keys", "tester:secret-key\n", 0600);
  Server server(Overrides{{"api.key_file", dir / "keys"}});
  for (const std::string path : kFiles) CHECK(server.get(path).status == 200);
  CHECK(glm53::HttpClient(server.url()).request("HEAD", "/").status == 200);
  for (const char* path : {"/v1/models", "/v1/models/x", "/load", "/metrics"}) {
    CAPTURE(path);
    CHECK(server.get(path).status == 401);
  }
  for (const char* path : {"/page/other.mjs", "/page/", "/page/chat.mjs/x"}) CHECK(server.get(path).status == 404);
  CHECK(server.post("/v1/chat/completions", "{}").status == 401);
}

TEST_CASE("page: api.page = false takes it away") {
  Server open(Overrides{{"api.page", "false"}});
  TempDir dir;
  glm53::write_file(dir / "keys", "tester:secret-key\n", 0600);
  Server closed(Overrides{{"api.page", "false"}, {"api.key_file", dir / "keys"}});
  for (const std::string path : kFiles) {
    CAPTURE(path);
    CHECK(open.get(path).status == 404);
    CHECK(closed.get(path).status == 404);
  }
  CHECK(open.get("/v1/models").status == 200);
}
