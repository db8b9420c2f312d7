// The status page and the description of the admin API: files that come with the program.
#include "agent/api/admin_server.h"
#include "agent/api/embedded.h"
#include "common/static_file.h"

namespace glm53::agent {

void AdminServer::add_files() {
  const auto serve = [this](const char* path, std::string_view text, const char* type) {
    server_->route("GET", path,
                   [text, type](const HttpRequest&, const Reply& reply) { reply->send(static_file(text, type)); });
  };
  serve("/", embedded::index_html(), "text/html; charset=utf-8");
  serve("/page.css", embedded::page_css(), "text/css; charset=utf-8");
  serve("/page.js", embedded::page_js(), "text/javascript; charset=utf-8");
  route("GET", "/openapi.json", [](const HttpRequest&, const Reply& reply) {
    reply->send(static_file(embedded::openapi_json(), "application/json"));
  });
}

}  // namespace glm53::agent
