// Who may use the admin API.
#pragma once

#include <string>

#include <sys/types.h>

#include "common/http_server.h"

namespace glm53::agent {

/// Passes, or throws Error(denied). On the unix socket: root and `own_uid`, by peer credentials; a bearer token is not
/// needed there. Over TCP: the bearer token, compared in constant time; an empty `token` lets nobody in. Requests with
/// a Host or Origin of a browser's page are refused.
void authenticate(const HttpRequest& request, uid_t own_uid, const std::string& token);

}  // namespace glm53::agent
