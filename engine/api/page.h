// The built-in chat page: static files at "/" and below "/page/".
#pragma once

#include "common/http_server.h"

namespace glm53::api {

/// Adds the page's routes. Before HttpServer::start().
void install_page(HttpServer& server);
/// Whether a request asks for one of the page's files. They need no key: what they then ask of the API does.
bool is_page(const HttpRequest& request);

}  // namespace glm53::api
