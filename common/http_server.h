// The one HTTP server (Boost.Beast behind it): TCP, mutual TLS, unix sockets with peer credentials, thousands of
// connections, streams, disconnects seen at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/socket.h"
#include "common/tls.h"

namespace glm53 {

struct HttpRequest {
  std::string method, target, path;  ///< path: decoded, without query
  std::map<std::string, std::string> query;
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
  std::string peer;                            ///< "127.0.0.1:5123" or "unix"
  std::optional<PeerCredentials> credentials;  ///< unix sockets only
  std::optional<TlsPeer> tls;                  ///< TLS connections only
  std::map<std::string, std::string> params;   ///< "{id}" parts of the route
  /// First header of that name, case-insensitive; "" when absent.
  std::string_view header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
};

/// The way back to one client. Thread-safe; may outlive the handler. If it is destroyed without an answer the client
/// gets 500.
class HttpReply {
 public:
  virtual ~HttpReply() = default;
  virtual void send(HttpResponse response) = 0;
  /// Status line and headers of a chunked stream.
  virtual void start_stream(int status, std::string content_type,
                            std::vector<std::pair<std::string, std::string>> headers = {}) = 0;
  /// Queues one chunk, written atomically. False when the client is gone, or when it has not read for so long that over
  /// HttpServerOptions::max_backlog bytes are queued (the connection is then closed).
  virtual bool write(std::string chunk) = 0;
  virtual void finish() = 0;
  /// True until the client closed its side, a write failed or the answer is complete.
  virtual bool connected() const = 0;
  /// Called once, on a server thread, when the client leaves before the answer is complete; at once if it already has.
  virtual void on_disconnect(std::function<void()> callback) = 0;
};

/// Handlers run on a server thread and must not block; the request lives until the handler returns; long work answers
/// later through the reply. An Error thrown by a handler is answered by `on_error`.
using HttpHandler = std::function<void(const HttpRequest&, std::shared_ptr<HttpReply>)>;

struct HttpServerOptions {
  int threads = 1;
  size_t max_body = 256u << 20;             ///< larger: 413
  size_t max_headers = 64u << 10;           ///< larger: 431
  size_t max_backlog = 4u << 20;            ///< bytes queued for a client that does not read
  size_t max_connections = 20000;           ///< beyond: 503 and closed
  std::chrono::seconds header_timeout{30};  ///< from connection to complete request head
  std::chrono::seconds body_timeout{300};
  std::chrono::seconds idle_timeout{300};  ///< keep-alive
  std::function<HttpResponse(const HttpRequest&, const std::exception&)>
      on_error;  ///< also used for 400, 404, 405, 413 of the server itself
  /// Access log, metrics; the request without its body; status 499 when the client left first.
  std::function<void(const HttpRequest&, int status, std::chrono::microseconds)> on_done;
};

class HttpServer {
 public:
  explicit HttpServer(HttpServerOptions options);
  ~HttpServer();  ///< stops
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  /// pattern: "/v1/models/{id}"; a "*" pattern of a method catches the rest. HEAD falls back to GET, OPTIONS of a known
  /// path to 204 with Allow. Before start().
  void route(const std::string& method, const std::string& pattern, HttpHandler handler);
  /// Runs before every handler (authentication); may throw Error. Before start().
  void before(std::function<void(const HttpRequest&)> check);
  /// Throws Error(busy) when the address is in use. Returns the port.
  uint16_t listen_tcp(const std::string& address, uint16_t port);
  void listen_unix(const std::string& path, int mode);
  /// As listen_tcp(), with TLS: `current` is asked for every connection, so that a new certificate takes effect. Any
  /// client is let in; the check of before() sees who it is.
  uint16_t listen_tls(const std::string& address, uint16_t port,
                      std::function<std::shared_ptr<const TlsServer>()> current);
  void start();
  /// Stops accepting, closes idle connections, waits up to `grace` for answers in flight.
  void stop(std::chrono::milliseconds grace);
  size_t connections() const;
  /// Runs `task` on a server thread every `period` until stop.
  void every(std::chrono::milliseconds period, std::function<void()> task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// An Error with the HTTP status it should have, where Code alone does not say (404 of a path, 405, 413, 431).
class HttpError : public std::runtime_error {
 public:
  HttpError(int status, const std::string& what) : std::runtime_error(what), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

}  // namespace glm53
