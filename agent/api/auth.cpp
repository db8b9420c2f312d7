#include "agent/api/auth.h"

#include "common/error.h"
#include "common/strings.h"

namespace glm53::agent {

namespace {

constexpr std::string_view kJoin = "/admin/v1/cluster/join";
constexpr std::string_view kBetweenAgents = "/admin/v1/node/";

trust::Right right_of(const HttpRequest& request) {
  if (request.path.starts_with(kBetweenAgents)) return trust::Right::command;
  return request.method == "GET" || request.method == "HEAD" ? trust::Right::read : trust::Right::operate;
}

}  // namespace

std::string requester(const HttpRequest& request) {
  if (const auto& local = request.credentials)
    return cat("uid ", static_cast<int64_t>(local->uid), " pid ", static_cast<int64_t>(local->pid));
  if (request.tls && request.tls->shown) return cat(request.tls->certificate.identity.text(), " at ", request.peer);
  return request.peer;
}

void authenticate(const HttpRequest& request, uid_t own_uid, const std::string& token, const trust::Trust* trust) {
  // No browser has business here: a page that reaches a loopback port by rebinding its name always sends its origin.
  if (!request.header("Origin").empty()) throw Error(Code::denied, "the admin API answers no web pages");
  if (request.credentials) {
    const uid_t uid = request.credentials->uid;
    if (uid == 0 || uid == own_uid) return;
    throw Error(Code::denied, cat("user ", uid, " may not use the admin socket"), "use the agent's user or root");
  }
  if (request.tls) {
    if (request.path == kJoin && request.method == "POST") return;
    if (trust == nullptr) throw Error(Code::denied, "this agent has no certificates");
    trust->authorize(*request.tls, right_of(request));
    return;
  }
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view header = request.header("Authorization");
  const std::string_view given = header.starts_with(kScheme) ? trim(header.substr(kScheme.size())) : std::string_view();
  if (token.empty() || given.empty() || !equal_constant_time(given, token)) {
    throw Error(Code::denied, given.empty() ? "the admin token is missing" : "this is not the admin token",
                "send the token of admin.token_file");
  }
}

}  // namespace glm53::agent
