// Files that come inside a program and are served to browsers as they are.
#pragma once

#include <string_view>

#include "common/http_server.h"

namespace glm53 {

/// 200 with `text`, whose lifetime is the program's. The headers let a page load scripts and styles from its own server
/// only and talk to nobody else; nothing inline runs, nothing is made from text but text (Trusted Types), and no frame
/// may hold it. Images may come out of the page itself (data: URLs).
HttpResponse static_file(std::string_view text, std::string_view content_type);

}  // namespace glm53
