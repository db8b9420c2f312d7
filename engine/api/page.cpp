#include "engine/api/page.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "common/static_file.h"
#include "engine/api/embedded.h"

namespace glm53::api {
namespace {

constexpr const char* kScript = "text/javascript; charset=utf-8";

struct File {
  const char* path;
  const char* type;
  std::string_view (*text)();
};
constexpr std::array kFiles = {File{"/", "text/html; charset=utf-8", embedded::index_html},
                               File{"/page/chat.css", "text/css; charset=utf-8", embedded::chat_css},
                               File{"/page/chat.mjs", kScript, embedded::chat_mjs},
                               File{"/page/markdown.mjs", kScript, embedded::markdown_mjs},
                               File{"/page/stream.mjs", kScript, embedded::stream_mjs},
                               File{"/page/view.mjs", kScript, embedded::view_mjs}};

}  // namespace

void install_page(HttpServer& server) {
  for (const File& file : kFiles) {
    server.route("GET", file.path, [&file](const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
      reply->send(static_file(file.text(), file.type));
    });
  }
}

bool is_page(const HttpRequest& request) {
  return (request.method == "GET" || request.method == "HEAD") &&
         std::any_of(kFiles.begin(), kFiles.end(), [&](const File& file) { return request.path == file.path; });
}

}  // namespace glm53::api
