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

/// An address or localhost: no name that somebody's name server could answer for.
bool names_this_machine(std::string_view host) {
  if (host.empty()) return true;
  if (host.starts_with('[')) return true;
  host = host.substr(0, host.find(':'));
  return host == "localhost" || host.find_first_not_of("0123456789.") == std::string_view::npos;
}

}  // namespace

std::string requester(const HttpRequest& request) {
  if (const auto& local = request.credentials)
    return cat("uid ", static_cast<int64_t>(local->uid), " pid ", static_cast<int64_t>(local->pid));
  if (request.tls && request.tls->shown) return cat(request.tls->certificate.identity.text(), " at ", request.peer);
  return request.peer;
}

void authenticate(const HttpRequest& request, uid_t own_uid, const std::string& token, const trust::Trust* trust) {
  // The status page and its files say nothing about anybody.
  const bool is_page = request.path == "/" || request.path == "/page.css" || request.path == "/page.js";
  // Our own page reads from where it came from. Another page's requests have an origin or say that they cross sites;
  // one that reaches us by rebinding its own name has that name as host.
  const std::string_view site = request.header("Sec-Fetch-Site");
  const bool foreign = !request.header("Origin").empty() || (!site.empty() && site != "same-origin" && site != "none");
  if (foreign && !is_page) throw Error(Code::denied, "the admin API answers no other web pages");
  if (!request.tls && !names_this_machine(request.header("Host")))
    throw Error(Code::denied, "the admin API answers under localhost or an address only, not under a name");
  if (is_page) return;
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
