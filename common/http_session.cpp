#include "common/http_session.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <sys/socket.h>
#include <sys/uio.h>

#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::http {

namespace asio = boost::asio;
namespace beast = boost::beast;

namespace {

constexpr size_t kMaxPipelined = 64 << 10;    ///< bytes kept of requests that wait for the one being answered
constexpr size_t kMaxDiscarded = 256 << 20;   ///< bytes thrown away while the client still sends a refused body
constexpr std::chrono::seconds kPatience{1};  ///< from too many pipelined bytes to throwing them away
constexpr std::chrono::seconds kLinger{5};    ///< for the client to read the last answer and close
constexpr size_t kReceive = 64 << 10;
constexpr size_t kRecord = 16 << 10;  ///< most bytes of a TLS record

/// A body that grows with what arrives; Beast's own reserves what the client announces.
struct GrowingBody {
  using value_type = std::string;
  class reader {
   public:
    template <bool is_request, class Fields>
    reader(beast::http::header<is_request, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<std::uint64_t>&, beast::error_code& ec) { ec = {}; }
    template <class Buffers>
    std::size_t put(const Buffers& buffers, beast::error_code& ec) {
      ec = {};
      std::size_t n = 0;
      for (auto it = asio::buffer_sequence_begin(buffers); it != asio::buffer_sequence_end(buffers); ++it) {
        const asio::const_buffer piece = *it;
        body_.append(static_cast<const char*>(piece.data()), piece.size());
        n += piece.size();
      }
      return n;
    }
    void finish(beast::error_code& ec) { ec = {}; }

   private:
    value_type& body_;
  };
};

class Reply : public HttpReply {
 public:
  explicit Reply(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}
  Reply(const Reply&) = delete;
  Reply& operator=(const Reply&) = delete;
  ~Reply() override { exchange_->abandon(); }
  void send(HttpResponse response) override { exchange_->send(std::move(response)); }
  void start_stream(int status, std::string content_type,
                    std::vector<std::pair<std::string, std::string>> headers) override {
    exchange_->start_stream(status, content_type, headers);
  }
  bool write(std::string chunk) override { return exchange_->write(chunk); }
  void finish() override { exchange_->finish(); }
  bool connected() const override { return exchange_->connected(); }
  void on_disconnect(std::function<void()> callback) override { exchange_->on_disconnect(std::move(callback)); }

 private:
  const std::shared_ptr<Exchange> exchange_;
};

int status_of(const beast::error_code& ec) {
  if (ec == beast::http::error::header_limit) return 431;
  if (ec == beast::http::error::body_limit) return 413;
  if (ec == beast::http::error::bad_version) return 505;
  return 400;
}

std::string joined(const std::vector<std::string>& parts) {
  return join(parts, ", ");
}

}  // namespace

struct Session::Parser {
  explicit Parser(const HttpServerOptions& options) {
    parser.header_limit(static_cast<std::uint32_t>(std::min<size_t>(options.max_headers, UINT32_MAX)));
    parser.body_limit(options.max_body);
    parser.eager(true);
  }
  beast::http::request_parser<GrowingBody> parser;
};

Session::Session(std::shared_ptr<Context> context, Socket socket, std::string peer,
                 std::optional<PeerCredentials> credentials, std::unique_ptr<TlsStream> tls)
    : context_(std::move(context)),
      socket_(std::move(socket)),
      timer_(socket_.get_executor()),
      peer_(std::move(peer)),
      credentials_(credentials),
      tls_(std::move(tls)) {}

Session::~Session() = default;

void Session::start() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    if (self->context_->stopping) return self->close();
    self->set_timer(self->context_->options.header_timeout);
    self->wait_readable();
  });
}

void Session::post_flush() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->flush(); });
}

void Session::post_close(bool only_idle) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), only_idle] {
    if (!only_idle || self->state_ != State::handling) self->lost();
  });
}

// ---- input ----

void Session::wait_readable() {
  if (waiting_readable_ || state_ == State::closed) return;
  waiting_readable_ = true;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const boost::system::error_code& ec) {
    self->waiting_readable_ = false;
    if (self->state_ == State::closed) return;
    if (ec) return self->lost();
    self->on_readable();
  });
}

void Session::on_readable_tls() {
  std::array<char, kRecord> buffer;  // a whole record: nothing stays behind in OpenSSL
  const TlsStream::Step step = tls_->read(buffer.data(), buffer.size());
  switch (step.state) {
    case TlsStream::State::done:
      return receive({buffer.data(), step.bytes});
    case TlsStream::State::want_read:
      return wait_readable();
    case TlsStream::State::want_write:  // a handshake's flight that does not fit the socket's buffer
      waiting_readable_ = true;
      return socket_.async_wait(Socket::wait_write, [self = shared_from_this()](const boost::system::error_code& ec) {
        self->waiting_readable_ = false;
        if (self->state_ == State::closed) return;
        if (ec) return self->lost();
        self->on_readable();
      });
    case TlsStream::State::closed:
      return lost();
  }
}

void Session::on_readable() {
  if (tls_) return on_readable_tls();
  std::array<char, kReceive> buffer;
  const ssize_t n = ::recv(socket_.native_handle(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (n > 0) return receive({buffer.data(), static_cast<size_t>(n)});
  // The end of the input counts as the end of the client, also while it could still read.
  if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return lost();
  wait_readable();
}

void Session::receive(std::string_view data) {
  if (state_ == State::lingering) {
    discarded_ += data.size();
    if (discarded_ > kMaxDiscarded) return close();
    return wait_readable();
  }
  if (state_ == State::handling) {
    if (discarding_) {
      discarded_ += data.size();
      return discarded_ > kMaxDiscarded ? lost() : wait_readable();
    }
    input_ += data;
    if (input_.size() < kMaxPipelined) return wait_readable();
    // The client has to wait. A write that waits has set the timer already, and notices a departure itself.
    if (!waiting_writable_) set_timer(kPatience);
    return;
  }
  input_ += data;
  parse();
  wait_readable();
}

void Session::parse() {
  while (!input_.empty() && (state_ == State::idle || state_ == State::head || state_ == State::body)) {
    const size_t used = parse_some(input_);
    input_.erase(0, used);
    if (used == 0) break;
  }
  if (input_.empty()) std::string().swap(input_);  // idle connections own no memory
  const bool parsing = state_ == State::head || state_ == State::body;
  if (parsing && input_.size() > context_->options.max_headers + kReceive) refuse(431, "header fields are too large");
}

size_t Session::parse_some(std::string_view data) {
  if (state_ == State::idle) {
    const size_t blank = data.find_first_not_of("\r\n");
    if (blank != 0) return std::min(blank, data.size());
    parser_ = std::make_unique<Parser>(context_->options);
    state_ = State::head;
    if (!first_) set_timer(context_->options.header_timeout);
    first_ = false;
  }
  auto& parser = parser_->parser;
  beast::error_code ec;
  const size_t used = parser.put(asio::buffer(data.data(), data.size()), ec);
  if (ec && ec != beast::http::error::need_more) {
    const int status = status_of(ec);
    const auto& options = context_->options;
    if (status == 413) {
      refuse(status, cat("the body is larger than ", options.max_body, " bytes"));
    } else if (status == 431) {
      refuse(status, cat("the header fields are larger than ", options.max_headers, " bytes"));
    } else {
      refuse(status, cat("malformed HTTP request: ", ec.message()));
    }
    return used;
  }
  if (state_ == State::head && parser.is_header_done()) enter_body();
  if (state_ == State::body && parser.is_done()) begin_exchange();
  return used;
}

void Session::enter_body() {
  state_ = State::body;
  const auto& message = parser_->parser.get();
  if (parser_->parser.is_done()) return;
  set_timer(context_->options.body_timeout);
  if (message.version() >= 11 && beast::iequals(message[beast::http::field::expect], "100-continue")) {
    output_.emplace_back("HTTP/1.1 100 Continue\r\n\r\n");
    send_pending();
  }
}

// ---- requests ----

void Session::begin_exchange() {
  state_ = State::handling;
  stop_timer();
  auto message = parser_->parser.release();
  parser_.reset();
  const auto exchange = std::make_shared<Exchange>(context_, weak_from_this());
  exchange_ = exchange;
  exchange->http11 = message.version() >= 11;
  exchange->keep_alive = message.keep_alive();
  HttpRequest& request = exchange->request;
  request.method = std::string(message.method_string());
  request.target = std::string(message.target());
  exchange->head_only = request.method == "HEAD";
  for (const auto& field : message) request.headers.emplace_back(field.name_string(), field.value());
  request.body = std::move(message.body());
  request.peer = peer_;
  request.credentials = credentials_;
  if (tls_) request.tls = tls_->peer();
  const auto fail = [&](const std::exception& e) {
    if (!exchange->send(context_->describe(request, e))) exchange->abandon();
  };
  try {
    dispatch(std::make_shared<Reply>(exchange));
  } catch (const std::exception& e) {
    fail(e);
  } catch (...) {
    fail(Error(Code::internal, "a handler threw something unknown"));
  }
  std::string().swap(request.body);  // may be large, and the answer may take long
}

void Session::dispatch(const std::shared_ptr<HttpReply>& reply) {
  HttpRequest& request = exchange_->request;
  const bool whole_server = request.method == "OPTIONS" && request.target == "*";
  Target target = parse_target(whole_server ? "/" : std::string_view(request.target));
  request.path = std::move(target.path);
  request.query = std::move(target.query);
  auto match = context_->routes.find(request.method, target.segments);
  if (match.handler != nullptr) {
    request.params = std::move(match.params);
    if (context_->before) context_->before(request);
    return (*match.handler)(request, reply);
  }
  HttpResponse response;
  if (whole_server || (request.method == "OPTIONS" && !match.allowed.empty())) {
    response.status = 204;
  } else if (match.allowed.empty()) {
    throw HttpError(404, cat("no such path: ", request.path));
  } else {
    response = context_->describe(request, HttpError(405, cat(request.method, " is not possible on ", request.path,
                                                              ", only ", joined(match.allowed))));
  }
  if (!match.allowed.empty()) response.headers.emplace_back("Allow", joined(match.allowed));
  reply->send(std::move(response));
}

/// Answers what is not a request, or not one to be taken; the connection ends after it.
void Session::refuse(int status, const std::string& what) {
  state_ = State::handling;
  stop_timer();
  exchange_ = std::make_shared<Exchange>(context_, weak_from_this());
  exchange_->keep_alive = false;
  HttpRequest& request = exchange_->request;
  if (parser_ && parser_->parser.is_header_done()) {
    request.method = std::string(parser_->parser.get().method_string());
    request.target = std::string(parser_->parser.get().target());
  }
  request.peer = peer_;
  request.credentials = credentials_;
  parser_.reset();
  exchange_->send(context_->describe(request, HttpError(status, what)));
}

// ---- output ----

void Session::flush() {
  if (state_ != State::handling || !exchange_) return;
  auto out = exchange_->take_output();
  for (auto& piece : out.pieces) output_.push_back(std::move(piece));
  if (out.overflowed) return lost();
  if (out.abandoned) {
    const Error error(Code::internal, "the request was dropped without an answer");
    if (exchange_->send(context_->describe(exchange_->request, error))) return;  // comes back here
    answer_complete_ = close_after_ = true;  // the missing last chunk tells the client
  }
  if (out.finished) {
    answer_complete_ = true;
    close_after_ = close_after_ || !out.keep_alive;
  }
  if (!waiting_writable_) send_pending();
}

/// As sendmsg() answers, errno included.
ssize_t Session::send_some() {
  if (tls_) {
    const std::string& piece = output_.front();
    const TlsStream::Step step = tls_->write(piece.data() + output_offset_, piece.size() - output_offset_);
    if (step.state == TlsStream::State::done) return static_cast<ssize_t>(step.bytes);
    errno = step.state == TlsStream::State::want_write ? EAGAIN : EPIPE;
    return -1;
  }
  std::array<iovec, 32> pieces;
  const size_t count = std::min(pieces.size(), output_.size());
  for (size_t i = 0; i < count; ++i) {
    const size_t skip = i == 0 ? output_offset_ : 0;
    pieces[i] = {output_[i].data() + skip, output_[i].size() - skip};
  }
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = count;
  return ::sendmsg(socket_.native_handle(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Session::send_pending() {
  while (!output_.empty()) {
    if (output_.front().empty()) {  // nothing to encrypt
      output_.pop_front();
      output_offset_ = 0;
      continue;
    }
    const ssize_t n = send_some();
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return wait_writable();
      return lost();
    }
    if (exchange_) exchange_->written(static_cast<size_t>(n));
    output_offset_ += static_cast<size_t>(n);
    while (!output_.empty() && output_offset_ >= output_.front().size()) {
      output_offset_ -= output_.front().size();
      output_.pop_front();
    }
  }
  if (state_ != State::handling) return;
  stop_timer();
  if (answer_complete_) complete();
}

void Session::wait_writable() {
  waiting_writable_ = true;
  set_timer(context_->options.body_timeout);
  socket_.async_wait(Socket::wait_write, [self = shared_from_this()](const boost::system::error_code& ec) {
    self->waiting_writable_ = false;
    if (self->state_ == State::closed) return;
    if (ec) return self->lost();
    self->send_pending();
  });
}

void Session::complete() {
  const auto exchange = std::move(exchange_);
  exchange_.reset();
  exchange->end(false);
  report(*exchange, exchange->status());
  answer_complete_ = false;
  std::deque<std::string>().swap(output_);
  if (context_->stopping) return close();
  if (close_after_) return linger();
  state_ = State::idle;
  set_timer(context_->options.idle_timeout);
  parse();
  wait_readable();
}

/// Gives up what was pipelined, and the connection after this answer: only who reads sees that the client has left.
void Session::discard() {
  discarding_ = close_after_ = true;
  std::string().swap(input_);
  wait_readable();
}

/// Closing with unread input would reset the connection, and the client could lose the answer.
void Session::linger() {
  state_ = State::lingering;
  std::string().swap(input_);
  if (tls_) tls_->end();
  if (::shutdown(socket_.native_handle(), SHUT_WR) != 0) return close();
  set_timer(kLinger);
  wait_readable();
}

// ---- ends ----

void Session::lost() {
  const auto exchange = std::move(exchange_);
  exchange_.reset();
  if (exchange && state_ != State::closed) {
    report(*exchange, exchange->finished() ? exchange->status() : 499);
    const auto callback = exchange->end(true);
    try {
      if (callback) callback();
    } catch (const std::exception& e) {
      log::error(cat("disconnect handler: ", std::string_view(e.what())));
    }
  }
  close();
}

void Session::close() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  stop_timer();
  boost::system::error_code ignored;
  socket_.close(ignored);
  const auto self = shared_from_this();  // the set may hold the last reference
  {
    const std::lock_guard lock(context_->mutex);
    context_->sessions.erase(self);
  }
  context_->fewer.notify_all();
}

void Session::report(const Exchange& exchange, int status) noexcept {
  if (!context_->options.on_done) return;
  const auto took = std::chrono::steady_clock::now() - exchange.begin;
  try {
    context_->options.on_done(exchange.request, status, std::chrono::duration_cast<std::chrono::microseconds>(took));
  } catch (const std::exception& e) {
    log::error(cat("on_done: ", std::string_view(e.what())));
  }
}

void Session::set_timer(std::chrono::nanoseconds after) {
  timer_.expires_after(std::chrono::duration_cast<asio::steady_timer::duration>(after));
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& ec) {
    if (!ec) self->on_timer();
  });
}

void Session::stop_timer() {
  timer_.expires_at(asio::steady_timer::time_point::max());
}

void Session::on_timer() {
  // A handler that was already queued when the timer was set anew.
  if (timer_.expiry() > std::chrono::steady_clock::now()) return;
  switch (state_) {
    case State::head:
      return refuse(408, "the request head did not arrive in time");
    case State::body:
      return refuse(408, "the request body did not arrive in time");
    case State::handling:
      return waiting_writable_ ? lost() : discard();  // lost: the client does not read
    case State::idle:
    case State::lingering:
      return close();
    case State::closed:
      return;
  }
}

}  // namespace glm53::http
