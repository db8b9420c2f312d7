// One connection of HttpServer: a state machine over readiness events. Beast parses, Asio waits; all sends and receives
// are non-blocking and made here, so that an idle connection owns no buffer and one wait for input is always pending,
// by which a vanished client is seen.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>

#include "common/http_server.h"
#include "common/http_text.h"
#include "common/tls_stream.h"

namespace glm53::http {

class Session;

/// What all connections of a server share. Sessions own it, so it outlives replies that are still held somewhere.
struct Context {
  explicit Context(HttpServerOptions o) : options(std::move(o)), io(options.threads) {}
  /// Answer to an error; never throws.
  HttpResponse describe(const HttpRequest& request, const std::exception& e) const noexcept;

  // constant after start()
  const HttpServerOptions options;
  RouteTable routes;
  std::function<void(const HttpRequest&)> before;

  std::atomic<bool> stopping = false;  ///< answers say "Connection: close" from now on
  std::atomic<bool> stopped = false;   ///< no thread runs `io` any more

  std::mutex mutex;
  std::condition_variable fewer;                          ///< a session has left
  std::unordered_set<std::shared_ptr<Session>> sessions;  ///< guarded by mutex

  // Last: destroyed first, with the handlers still in it.
  boost::asio::io_context io;
};

/// One request and its answer: shared between the session (server threads) and the reply (any thread).
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<Context> context, std::weak_ptr<Session> session);

  // Set by the session before the handler runs.
  HttpRequest request;
  bool http11 = true, keep_alive = true, head_only = false;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  bool send(HttpResponse response);
  bool start_stream(int status, std::string_view content_type,
                    const std::vector<std::pair<std::string, std::string>>& headers);
  bool write(std::string_view chunk);
  void finish();
  bool connected() const;
  void on_disconnect(std::function<void()> callback);
  /// The reply was destroyed.
  void abandon();

  // For the session.
  struct Output {
    std::vector<std::string> pieces;
    bool finished = false, abandoned = false, overflowed = false, keep_alive = true;
  };
  Output take_output();
  void written(size_t bytes);
  /// Ends the exchange; the callback to run if the client left before the answer was complete.
  std::function<void()> end(bool client_left);
  int status() const;
  bool finished() const;

 private:
  enum class Phase { waiting, streaming, finished, gone };
  void queue(std::string piece);
  void schedule();

  const std::shared_ptr<Context> context_;
  const std::weak_ptr<Session> session_;
  mutable std::mutex mutex_;
  Phase phase_ = Phase::waiting;
  int status_ = 0;
  std::vector<std::string> pieces_;
  size_t queued_ = 0;  ///< bytes not yet taken by the kernel
  bool scheduled_ = false, abandoned_ = false, overflowed_ = false;
  std::function<void()> disconnect_;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;
  Session(std::shared_ptr<Context> context, Socket socket, std::string peer, std::optional<PeerCredentials> credentials,
          std::unique_ptr<TlsStream> tls);
  ~Session();
  /// Begins to wait for a request.
  void start();
  /// Any thread: sends what the exchange has queued.
  void post_flush();
  /// Any thread: closes now, or (only_idle) unless a request is being answered.
  void post_close(bool only_idle);

 private:
  enum class State { idle, head, body, handling, lingering, closed };
  struct Parser;

  void wait_readable();
  void on_readable();
  void on_readable_tls();
  void receive(std::string_view data);
  void parse();
  size_t parse_some(std::string_view data);
  void enter_body();
  void begin_exchange();
  void dispatch(const std::shared_ptr<HttpReply>& reply);
  void refuse(int status, const std::string& what);
  void flush();
  void send_pending();
  ssize_t send_some();
  void wait_writable();
  void complete();
  void discard();
  void linger();
  void lost();
  void close();
  void set_timer(std::chrono::nanoseconds after);
  void stop_timer();
  void on_timer();
  void report(const Exchange& exchange, int status) noexcept;

  const std::shared_ptr<Context> context_;
  Socket socket_;
  boost::asio::steady_timer timer_;
  const std::string peer_;
  const std::optional<PeerCredentials> credentials_;
  const std::unique_ptr<TlsStream> tls_;  ///< null: plain
  State state_ = State::idle;
  std::unique_ptr<Parser> parser_;
  std::string input_;               ///< received, not yet parsed
  std::deque<std::string> output_;  ///< not yet taken by the kernel
  size_t output_offset_ = 0;        ///< of output_.front()
  size_t discarded_ = 0;            ///< while discarding or lingering
  std::shared_ptr<Exchange> exchange_;
  bool first_ = true;  ///< no request has been parsed yet
  bool waiting_readable_ = false, waiting_writable_ = false;
  bool answer_complete_ = false;  ///< all of it is in output_ or sent
  bool discarding_ = false;       ///< what comes behind the request being answered is thrown away
  bool close_after_ = false;
};

}  // namespace glm53::http
