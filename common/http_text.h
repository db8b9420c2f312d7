// Text of HTTP messages and the route table behind HttpServer; no sockets, no Boost.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/http_server.h"

namespace glm53::http {

/// A request target split up. Throws HttpError(400) for invalid percent-encoding or control characters.
struct Target {
  std::string path;                   ///< decoded
  std::vector<std::string> segments;  ///< decoded one by one, so that "%2F" separates nothing
  std::map<std::string, std::string> query;
};
Target parse_target(std::string_view target);

/// Head of an answer up to and with the empty line.
struct Head {
  int status = 200;
  bool http11 = true, keep_alive = true;
  bool chunked = false;
  bool has_length = false;
  size_t length = 0;
  std::string_view content_type;
};
std::string format_head(const Head& head, const std::vector<std::pair<std::string, std::string>>& headers);
/// "Not Found"; "Unknown" for numbers without a name.
std::string_view reason(int status);
/// One chunk of the chunked transfer coding; empty data has none.
std::string frame_chunk(std::string_view data);

/// The answer to an exception where the server's owner gives none: {"error":{"message":…,"code":…}}.
HttpResponse default_error(const std::exception& e);
/// Status of an exception: of HttpError its own, of Error by its code, else 500.
int error_status(const std::exception& e);

/// Handlers by method and pattern.
class RouteTable {
 public:
  struct Match {
    const HttpHandler* handler = nullptr;
    std::map<std::string, std::string> params;
    std::vector<std::string> allowed;  ///< methods of the path, when the asked one is not among them
  };
  void add(const std::string& method, const std::string& pattern, HttpHandler handler);
  /// HEAD falls back to GET. The pattern with the fewest parameters wins, then the first.
  Match find(const std::string& method, const std::vector<std::string>& segments) const;

 private:
  struct Route {
    std::string method;
    std::vector<std::string> segments;
    bool any = false;  ///< the "*" pattern
    size_t params = 0;
    HttpHandler handler;
  };
  const Route* best(const std::string& method, const std::vector<std::string>& segments) const;
  std::vector<Route> routes_;
};

}  // namespace glm53::http
