// The cluster's trust over the admin API: CA, join tokens, members, and a worker's own join.
#include <nlohmann/json.hpp>

#include "agent/api/admin_server.h"
#include "agent/api/auth.h"
#include "agent/trust/renewal.h"
#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kHour = 3600;

void send(const std::shared_ptr<HttpReply>& reply, const Json& body) {
  HttpResponse response;
  response.body = dump(body);
  reply->send(std::move(response));
}

/// The text members of a body, "" where one is missing; others are refused by name.
std::map<std::string, std::string> texts_of(const HttpRequest& request, std::initializer_list<const char*> members) {
  const Json body =
      request.body.empty() ? Json::object() : parse_json(request.body, {.max_bytes = 65536, .max_depth = 2});
  if (!body.is_object()) throw Error(Code::usage, "the body must be a JSON object");
  std::map<std::string, std::string> out;
  for (const char* name : members) out[name];
  for (const auto& [key, value] : body.items()) {
    if (!out.contains(key) || !value.is_string())
      throw Error(Code::usage, cat("member '", key, "' is unknown or no text"));
    out[key] = value.get<std::string>();
  }
  return out;
}

Json cluster_json(const trust::Trust& trust) {
  const auto own = trust.own();
  Json members = Json::array();
  for (const trust::Member& m : trust.members()) {
    members.push_back({{"name", m.name},
                       {"role", m.role},
                       {"fingerprint", m.fingerprint},
                       {"issued_at", m.issued_at * 1000},
                       {"expires_at", m.expires_at * 1000},
                       {"removed", m.removed}});
  }
  const auto text = [](const std::string& value) { return value.empty() ? Json(nullptr) : Json(value); };
  return {{"cluster", text(trust.cluster())},
          {"ca_fingerprint", text(trust.ca_fingerprint())},
          {"name", own ? Json(own->identity.name) : Json(nullptr)},
          {"role", own ? Json(own->identity.role) : Json(nullptr)},
          {"expires_at", own ? Json(own->validity.until * 1000) : Json(nullptr)},
          {"members", members}};
}

}  // namespace

void AdminServer::add_cluster_routes() {
  const auto trust = context_.settings.trust;
  if (!trust) return;
  const auto heads_only = [this] {
    if (context_.driver == nullptr) throw Error(Code::usage, "this node is a worker", "ask the head's agent");
  };
  route("GET", "/cluster", [trust](const HttpRequest&, const Reply& reply) { send(reply, cluster_json(*trust)); });
  route("POST", "/cluster/init", [this, trust, heads_only](const HttpRequest& request, const Reply& reply) {
    heads_only();
    (void)texts_of(request, {});
    trust->init(context_.file.config().text("cluster.name"), context_.settings.name);
    context_.journal.note("info", cat("cluster CA made by ", requester(request), ": sha256:", trust->ca_fingerprint()));
    send(reply, cluster_json(*trust));
  });
  route("POST", "/cluster/tokens", [this, trust, heads_only](const HttpRequest& request, const Reply& reply) {
    heads_only();
    const auto body = texts_of(request, {"role", "name", "expires"});
    const std::string role = body.at("role").empty() ? "node" : body.at("role");
    const std::string name = body.at("name").empty() && role == "node" ? "worker" : body.at("name");
    const auto span = body.at("expires").empty() ? std::chrono::seconds(kHour) : parse_duration(body.at("expires"));
    if (!span) throw Error(Code::usage, cat("member 'expires' must be a time such as 1h, not ", body.at("expires")));
    const int64_t seconds = std::chrono::duration_cast<std::chrono::seconds>(*span).count();
    const JoinToken token = trust->make_token(role, name, seconds);
    context_.journal.note("info", cat("join token for ", role, " ", name, " made by ", requester(request)));
    send(reply,
         {{"token", token.text()}, {"role", role}, {"name", name}, {"expires_at", (tls_now() + seconds) * 1000}});
  });
  route("POST", "/cluster/join", [this, trust, heads_only](const HttpRequest& request, const Reply& reply) {
    heads_only();
    const auto body = texts_of(request, {"token", "request"});
    try {
      const Credentials made = trust->admit(body.at("token"), body.at("request"));
      const pki::Identity who = pki::read_certificate(made.certificate).identity;
      context_.journal.note("info", cat(who.text(), " joined from ", request.peer));
      context_.driver->reconnect_worker();
      send(reply, {{"certificate", made.certificate}, {"ca", made.ca}});
    } catch (const Error& e) {
      context_.journal.note("warn", cat("a join from ", request.peer, " was refused: ", e.what()));
      throw;
    }
  });
  route("POST", "/cluster/enter",
        [this](const HttpRequest& request, const Reply& reply) { join_head(request, reply); });
  route("POST", "/node/certificate", [this, trust](const HttpRequest& request, const Reply& reply) {
    if (context_.driver != nullptr) throw Error(Code::usage, "this node is the head; its certificate is its own");
    const auto before = trust->own();
    HttpResponse response;
    response.body = trust::renewal_answer(*trust, request.body);
    const auto now = trust->own();
    if (before && now && before->fingerprint != now->fingerprint)
      context_.journal.note("info", cat("certificate renewed, until ", pki::time_text(now->validity.until)));
    reply->send(std::move(response));
  });
  route("DELETE", "/cluster/members/{name}", [this, trust, heads_only](const HttpRequest& request, const Reply& reply) {
    heads_only();
    const std::string& name = request.params.at("name");
    trust->remove(name);
    context_.driver->reconnect_worker();
    context_.journal.note("info", cat(name, " removed from the cluster by ", requester(request)));
    send(reply, cluster_json(*trust));
  });
}

/// On a worker: takes a token to the head and keeps the certificate.
void AdminServer::join_head(const HttpRequest& request, const Reply& reply) {
  if (context_.driver != nullptr) throw Error(Code::usage, "this node is the head", "join from the worker");
  const auto body = texts_of(request, {"head", "token"});
  const JoinToken token = JoinToken::parse(body.at("token"));
  const std::string head = body.at("head");
  (void)parse_host_port(head);
  in_background([this, reply, token, head, by = requester(request), trust = context_.settings.trust] {
    try {
      trust->adopt(join_cluster(head, token));
      context_.journal.note("info", cat("joined cluster ", trust->cluster(), " at ", head, ", asked by ", by));
      send(reply, cluster_json(*trust));
    } catch (const std::exception& e) {
      context_.journal.note("warn", cat("joining ", head, " failed: ", log::redact(e.what())));
      reply->send(error_response(e));
    }
  });
}

}  // namespace glm53::agent
