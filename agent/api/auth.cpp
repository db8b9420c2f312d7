#include "agent/api/auth.h"

#include "common/error.h"
#include "common/strings.h"

namespace glm53::agent {

void authenticate(const HttpRequest& request, uid_t own_uid, const std::string& token) {
  // No browser has business here: a page that reaches a loopback port by rebinding its name always sends its origin.
  if (!request.header("Origin").empty()) throw Error(Code::denied, "the admin API answers no web pages");
  if (request.credentials) {
    const uid_t uid = request.credentials->uid;
    if (uid == 0 || uid == own_uid) return;
    throw Error(Code::denied, cat("user ", uid, " may not use the admin socket"), "use the agent's user or root");
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
