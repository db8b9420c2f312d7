// The status page and the description of the admin API: files that come with the program.
#include "agent/api/admin_server.h"
#include "agent/api/embedded.h"

namespace glm53::agent {
namespace {

/// Nothing from elsewhere, nothing inline, in nobody's frame.
constexpr const char* kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'";

HttpResponse file(std::string_view text, const char* type) {
  HttpResponse response;
  response.body = text;
  response.content_type = type;
  response.headers = {{"Content-Security-Policy", kPolicy},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cache-Control", "no-cache"}};
  return response;
}

}  // namespace

void AdminServer::add_files() {
  const auto serve = [this](const char* path, std::string_view text, const char* type) {
    server_->route("GET", path,
                   [text, type](const HttpRequest&, const Reply& reply) { reply->send(file(text, type)); });
  };
  serve("/", embedded::index_html(), "text/html; charset=utf-8");
  serve("/page.css", embedded::page_css(), "text/css; charset=utf-8");
  serve("/page.js", embedded::page_js(), "text/javascript; charset=utf-8");
  route("GET", "/openapi.json", [](const HttpRequest&, const Reply& reply) {
    reply->send(file(embedded::openapi_json(), "application/json"));
  });
}

}  // namespace glm53::agent
