// The admin API as agent/api/openapi.json describes it: every route, every member of every answer, and the status page
// that is made of them.
#include "tests/openapi.h"

#include <algorithm>
#include <regex>
#include <set>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "agent/api/embedded.h"
#include "common/file.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/unit/agent/cluster.h"

using namespace glm53;
using test::eventually;
using test::kRunning;
using test::TestCluster;
using Json = nlohmann::ordered_json;

namespace {

const Json& document() {
  static const Json kDocument = parse_json(agent::embedded::openapi_json());
  return kDocument;
}

std::string complaints(const Json& value, const Json& schema) {
  return test::OpenApi(document()).complaints(value, schema);
}

/// Asks, and holds the answer against what the document says of that path, method and status.
void check(TestCluster& c, const std::string& method, const std::string& path, const std::string& described,
           const std::string& body = "", bool worker = false) {
  const HttpAnswer answer = c.ask(method, path, body, worker);
  CAPTURE(method);
  CAPTURE(path);
  CAPTURE(worker);
  CAPTURE(answer.body);
  std::string lower = method;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char ch) { return static_cast<char>(std::tolower(ch)); });
  const Json& operation = document()["paths"].at(described).at(lower);
  const Json& responses = operation["responses"];
  const std::string status = std::to_string(answer.status);
  const bool good = answer.status < 300;
  if (good) REQUIRE(responses.contains(status));
  const Json& content = responses[good ? status : "default"]["content"];
  if (!content.contains("application/json")) return;
  const Json json = parse_json(answer.body);
  CHECK(complaints(json, content["application/json"]["schema"]) == "");
  if (good && !body.empty() && operation["requestBody"]["content"].contains("application/json")) {
    const Json& schema = operation["requestBody"]["content"]["application/json"]["schema"];
    CHECK(complaints(parse_json(body), schema) == "");
  }
}

void check_all_gets(TestCluster& c, bool worker) {
  for (const auto& [path, methods] : document()["paths"].items()) {
    if (!methods.contains("get") || path.find('{') != std::string::npos || path == "/logs") continue;
    check(c, "GET", path, path, "", worker);
  }
}

}  // namespace

TEST_CASE("openapi: the checks of this test notice what is missing, undescribed or of a wrong type") {
  const Json& version = document()["components"]["schemas"]["Version"];
  CHECK(complaints({{"version", "1"}, {"node", "n"}, {"role", "head"}}, version) == "");
  CHECK(complaints({{"version", "1"}, {"node", "n"}}, version) == ".role is missing");
  CHECK(complaints({{"version", 1}, {"node", "n"}, {"role", "head"}}, version) == ".version is 1, not \"string\"");
  CHECK(complaints({{"version", "1"}, {"node", "n"}, {"role", "boss"}}, version) == ".role is \"boss\"");
  CHECK(complaints({{"version", "1"}, {"node", "n"}, {"role", "head"}, {"x", 1}}, version) == ".x is not described");
}

TEST_CASE("openapi: every route is described, and nothing else; docs/admin-api.md names them all") {
  TestCluster c;
  std::set<std::string> described;
  const std::string page = read_file(cat(GLM53_SOURCE_DIR, "/docs/admin-api.md"));
  for (const auto& [path, methods] : document()["paths"].items()) {
    for (const auto& [method, operation] : methods.items()) {
      std::string upper = method;
      std::transform(upper.begin(), upper.end(), upper.begin(),
                     [](char ch) { return static_cast<char>(std::toupper(ch)); });
      described.insert(cat(upper, " /admin/v1", path));
      CAPTURE(path);
      CHECK(operation.contains("summary"));
      CHECK(page.find(cat(upper, " `", path)) != std::string::npos);
    }
  }
  const auto routes = c.worker().routes();
  CHECK(std::set<std::string>(routes.begin(), routes.end()) == described);
}

TEST_CASE("openapi: every answer has the members that are described, in every state") {
  TestCluster c(true, "", "", "tls = \"on\"\n");
  check_all_gets(c, false);
  check(c, "POST", "/cluster/init", "/cluster/init", "{}");
  check(c, "POST", "/cluster/init", "/cluster/init", "{}");  // 409
  check(c, "POST", "/cluster/tokens", "/cluster/tokens", R"({"role":"operator","name":"alice","expires":"5m"})");
  check(c, "POST", "/cluster/tokens", "/cluster/tokens", R"({"role":"boss"})");
  check(c, "POST", "/cluster/join", "/cluster/join", R"({"token":"x","request":"y"})");
  check(c, "POST", "/cluster/enter", "/cluster/enter",
        dump({{"head", c.head_address()}, {"token", c.token("node", "worker")}}), true);
  check(c, "POST", "/node/certificate", "/node/certificate", "{}", true);
  check(c, "POST", "/node/certificate", "/node/certificate", R"({"certificate":"x"})", true);
  check(c, "PUT", "/wanted", "/wanted", dump(kRunning));
  check(c, "PUT", "/wanted", "/wanted", dump(kRunning));  // attached
  check(c, "PUT", "/wanted", "/wanted", R"({"state":"stopped"})");
  REQUIRE(c.reaches("up"));
  REQUIRE(
      eventually([&] { return !c.get("/status")["pools"].is_null() && c.get("/status")["model"]["digest"] == "d1"; }));
  check(c, "PUT", "/wanted", "/wanted", dump(kRunning));  // unchanged
  check_all_gets(c, false);
  check_all_gets(c, true);
  check(c, "GET", "/operations/op-1", "/operations/{id}");
  check(c, "GET", "/operations/op-99", "/operations/{id}");
  check(c, "GET", "/events?after=1", "/events");
  check(c, "GET", "/logs?process=rank0&lines=3", "/logs");
  check(c, "GET", "/logs?process=nobody", "/logs");
  check(c, "POST", "/config/check", "/config/check", "[node]\nrole = \"head\"\n");
  check(c, "POST", "/config/check", "/config/check", "nonsense");
  check(c, "POST", "/sync", "/sync", R"({"repo":"org/model","revision":"main"})");
  check(c, "POST", "/node/preflight", "/node/preflight", "{}", true);
  check(c, "POST", "/node/actions", "/node/actions", "{}", true);
  REQUIRE(c.kill("rank1"));
  REQUIRE(eventually(
      [&] { return c.get("/status")["cluster"]["generation"] == 2 || c.get("/status")["cluster"]["state"] != "up"; }));
  check_all_gets(c, false);
  check(c, "DELETE", "/cluster/members/worker", "/cluster/members/{name}");
  check(c, "DELETE", "/cluster/members/worker", "/cluster/members/{name}");  // 404
  check_all_gets(c, false);
}

TEST_CASE("page: served as it is, from here only, and made of members that the API has") {
  TestCluster c(false);
  HttpClient client("unix:" + (c.dir() / "head/run/agent.sock"));
  const auto header = [](const HttpAnswer& answer, const std::string& name) {
    for (const auto& [key, value] : answer.headers) {
      if (key == name) return value;
    }
    return std::string();
  };
  std::string all;
  for (const char* path : {"/", "/page.css", "/page.js"}) {
    CAPTURE(path);
    const HttpAnswer answer = client.request("GET", path);
    CHECK(answer.status == 200);
    CHECK(header(answer, "Content-Security-Policy").starts_with("default-src 'none'; script-src 'self'"));
    CHECK(header(answer, "X-Content-Type-Options") == "nosniff");
    all += answer.body;
  }
  for (const char* elsewhere : {"http:", "https:", "src=\"//", "url(", "@import", "eval(",
                                "innerHTML =", "onclick=", "style=\"", "<script>", "<style>"}) {
    CAPTURE(elsewhere);
    CHECK(all.find(elsewhere) == std::string::npos);
  }
  std::set<std::string> members;
  for (const auto& [name, schema] : document()["components"]["schemas"].items()) {
    const auto collect = [&](const auto& self, const Json& part) -> void {
      if (part.is_object() && part.contains("properties")) {
        for (const auto& [key, value] : part["properties"].items()) members.insert(key);
      }
      if (part.is_structured()) {
        for (const Json& inner : part) self(self, inner);
      }
    };
    collect(collect, schema);
  }
  const std::string script(agent::embedded::page_js());
  const std::regex member("\\.([a-z]+(?:_[a-z]+)+)\\b");
  size_t found = 0;
  for (std::sregex_iterator it(script.begin(), script.end(), member), end; it != end; ++it, ++found) {
    CAPTURE((*it)[1].str());
    CHECK(members.contains((*it)[1].str()));
  }
  CHECK(found > 20);
}

TEST_CASE("page: the API behind it answers no page of somebody else") {
  TestCluster c(false);
  const std::string socket = c.dir() / "head/run/agent.sock";
  const auto status = [&](const std::string& headers) {
    const UniqueFd fd = connect_unix(socket);
    const std::string text = cat("GET /admin/v1/version HTTP/1.1\r\nConnection: close\r\n", headers, "\r\n");
    send_all(fd.get(), std::as_bytes(std::span(text)));
    std::string answer = read_all(fd.get());
    return answer.substr(0, answer.find('\r'));
  };
  CHECK(status("Host: localhost:8890\r\n") == "HTTP/1.1 200 OK");
  CHECK(status("Host: 127.0.0.1:8890\r\nSec-Fetch-Site: same-origin\r\n") == "HTTP/1.1 200 OK");
  CHECK(status("Host: [::1]:8890\r\n") == "HTTP/1.1 200 OK");
  CHECK(status("Host: rebound.example:8890\r\n").find("401") != std::string::npos);
  CHECK(status("Host: localhost\r\nSec-Fetch-Site: cross-site\r\n").find("401") != std::string::npos);
  CHECK(status("Host: localhost\r\nSec-Fetch-Site: same-site\r\n").find("401") != std::string::npos);
  CHECK(status("Host: localhost\r\nOrigin: http://localhost:3000\r\n").find("401") != std::string::npos);
}
