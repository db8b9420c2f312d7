// Who may use the admin API.
#pragma once

#include <string>

#include <sys/types.h>

#include "agent/trust/trust.h"
#include "common/http_server.h"

namespace glm53::agent {

/// Passes, or throws Error(denied). On the unix socket: root and `own_uid`, by peer credentials; a bearer token is not
/// needed there. Over TLS: the certificate, by its role (agent/trust); POST /admin/v1/cluster/join needs none, but a
/// token in its body. Over TCP: the bearer token, compared in constant time; an empty `token` lets nobody in. Requests
/// with an Origin (a browser's page) are refused. `trust` may be null where there is no TLS.
void authenticate(const HttpRequest& request, uid_t own_uid, const std::string& token, const trust::Trust* trust);

/// Who asked, for records: "uid 0 pid 17", "operator alice at 10.0.0.9:5123", "127.0.0.1:5123".
std::string requester(const HttpRequest& request);

}  // namespace glm53::agent
