// A cluster over TLS: certificates, join tokens, and who is refused, with the line that an operator sees.
#include <memory>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/enrol.h"
#include "common/error.h"
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

const std::string kTls = "tls = \"on\"\n";

std::string message_of(const HttpAnswer& answer) {
  return parse_json(answer.body)["error"]["message"].get<std::string>();
}

/// Somebody with a certificate of the cluster, at the head's TCP address.
class Person {
 public:
  Person(TestCluster& c, const std::string& role, const std::string& name)
      : credentials_(join_cluster(c.head_address(), JoinToken::parse(c.token(role, name)))),
        url_("https://" + c.head_address()) {}
  HttpAnswer ask(const std::string& method, const std::string& path, const std::string& body = "") {
    TlsClientOptions options;
    options.certificate = credentials_.certificate;
    options.key = credentials_.key;
    options.ca = credentials_.ca;
    options.server_role = "head";
    HttpClient client(url_, {}, std::make_shared<TlsClient>(options));
    return client.request(method, "/admin/v1" + path, body);
  }

 private:
  const Credentials credentials_;
  const std::string url_;
};

}  // namespace

TEST_CASE("over TLS: init, join, start, stop; a removed worker is a stranger until it joins again") {
  TestCluster c(true, "", "", kTls);
  const auto worker_error = [&] {
    const Json status = c.get("/status");
    for (const Json& w : status["warnings"]) {
      if (w["name"] == "worker-unreachable") return w["text"].get<std::string>();
    }
    return std::string();
  };
  CHECK(eventually([&] { return worker_error().find("E720 this node has no certificate yet") != std::string::npos; }));
  CHECK(c.enter("nonsense").status == 400);
  REQUIRE(c.ask("POST", "/cluster/init").status == 200);
  CHECK(c.ask("POST", "/cluster/init").status == 409);
  const std::string token = c.token("node", "worker");
  REQUIRE(c.enter(token).status == 200);
  // The token is spent, for the same worker too.
  CHECK(message_of(c.enter(token)).find("E715 this join token was used already") != std::string::npos);
  CHECK(c.get("/cluster", true)["role"] == "node");
  CHECK(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  c.put(kRunning, 202);
  CHECK(c.reaches("up"));

  REQUIRE(c.ask("DELETE", "/cluster/members/worker").status == 200);
  CHECK(eventually([&] { return worker_error().find("E714 node worker was removed") != std::string::npos; }));
  REQUIRE(c.enter(c.token("node", "worker")).status == 200);
  CHECK(eventually([&] { return c.state() == "up" && worker_error().empty(); }));
}

TEST_CASE("over TLS: a token of another head is refused on both sides, in one line") {
  TestCluster c(true, "", "", kTls), other(false, "", "", kTls);
  REQUIRE(c.ask("POST", "/cluster/init").status == 200);
  REQUIRE(other.ask("POST", "/cluster/init").status == 200);
  const HttpAnswer answer = c.enter(other.token("node", "worker"));
  CHECK(answer.status == 401);
  CHECK(message_of(answer).find("E718 this is not the head that made the token: its CA is sha256:") !=
        std::string::npos);
  CHECK(c.get("/cluster", true)["role"].is_null());
}

TEST_CASE("over TLS: operators act, readers look, and strangers do neither") {
  TestCluster c(false, "", "", kTls);
  REQUIRE(c.ask("POST", "/cluster/init").status == 200);
  Person alice(c, "operator", "alice"), grafana(c, "reader", "grafana"), node(c, "node", "worker");
  CHECK(alice.ask("GET", "/status").status == 200);
  CHECK(grafana.ask("GET", "/status").status == 200);
  CHECK(message_of(node.ask("GET", "/status")) == "E719 node worker may not do that");
  CHECK(message_of(grafana.ask("PUT", "/wanted", dump(kRunning))) == "E719 reader grafana may not do that");
  CHECK(message_of(alice.ask("POST", "/node/actions", "{}")) == "E719 operator alice may not do that");
  REQUIRE(alice.ask("PUT", "/wanted", dump(kRunning)).status == 202);
  CHECK(c.reaches("up"));
  const Json operations = c.get("/operations");
  CHECK(operations["operations"][0]["requested_by"].get<std::string>().starts_with("operator alice at 127.0.0.1:"));
  REQUIRE(alice.ask("DELETE", "/cluster/members/grafana").status == 200);
  CHECK(message_of(grafana.ask("GET", "/status")) == "E714 reader grafana was removed from the cluster");
}

TEST_CASE("over TLS: the worker's certificate is renewed in its last days, and the link goes on") {
  TestCluster c(true, "", "", kTls);
  REQUIRE(c.ask("POST", "/cluster/init").status == 200);
  REQUIRE(c.enter(c.token("node", "worker")).status == 200);
  REQUIRE(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  const std::string file = c.dir() / "worker/state/tls/self.pem";
  const std::string before = load_credentials(file).certificate;
  // As if most of its time had passed, as far as the head knows.
  c.end_head();
  const std::string members = c.dir() / "head/state/tls/members.json";
  Json json = parse_json(read_file(members));
  for (Json& m : json["members"]) m["expires_at"] = tls_now() + 10 * 86'400;
  write_file(members, dump(json), 0600);
  c.start_head();
  CHECK(eventually([&] { return load_credentials(file).certificate != before; }));
  CHECK(eventually(
      [&] { return c.get("/cluster")["members"][0]["expires_at"].get<int64_t>() / 1000 > tls_now() + 800 * 86'400; }));
  CHECK(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  // The link goes on with the new one: the old one is not needed for it.
  c.end_worker();
  c.start_worker();
  CHECK(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  CHECK(read_file(members).find("\"previous\":\"\"") != std::string::npos);
}
