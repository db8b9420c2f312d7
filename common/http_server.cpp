#include "common/http_server.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "common/error.h"
#include "common/http_session.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53 {

namespace asio = boost::asio;
using http::Context;
using http::Session;

namespace {

using Strand = asio::strand<asio::io_context::executor_type>;

std::string address_text(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &address, sizeof v4);
    return cat(asio::ip::address_v4(ntohl(v4.sin_addr.s_addr)).to_string(), ":", ntohs(v4.sin_port));
  }
  sockaddr_in6 v6{};
  std::memcpy(&v6, &address, sizeof v6);
  asio::ip::address_v6::bytes_type bytes;
  std::memcpy(bytes.data(), &v6.sin6_addr, bytes.size());
  const asio::ip::address_v6 ip(bytes);
  if (ip.is_v4_mapped()) {
    const asio::ip::address_v4 v4({bytes[12], bytes[13], bytes[14], bytes[15]});
    return cat(v4.to_string(), ":", ntohs(v6.sin6_port));
  }
  return cat("[", ip.to_string(), "]:", ntohs(v6.sin6_port));
}

/// OpenSSL writes without MSG_NOSIGNAL.
void block_sigpipe() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

/// Accepts connections of one listening socket.
class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  using Tls = std::function<std::shared_ptr<const TlsServer>()>;
  Acceptor(std::shared_ptr<Context> context, UniqueFd listener, std::string unix_path, Tls tls)
      : context_(std::move(context)),
        strand_(asio::make_strand(context_->io)),
        listener_(strand_, listener.get()),
        retry_(strand_),
        unix_path_(std::move(unix_path)),
        tls_(std::move(tls)) {
    listener.release();
    if (::fcntl(listener_.native_handle(), F_SETFL, O_NONBLOCK) != 0) throw_errno(Code::internal, "fcntl");
  }

  void start() {
    asio::post(strand_, [self = shared_from_this()] { self->wait(); });
  }

  void close() {
    asio::post(strand_, [self = shared_from_this()] { self->close_now(); });
  }

  void close_now() {
    if (!listener_.is_open()) return;
    // Before the socket closes: afterwards the path may already be somebody else's.
    if (!unix_path_.empty()) ::unlink(unix_path_.c_str());
    boost::system::error_code ignored;
    listener_.close(ignored);
    retry_.cancel();
  }

 private:
  void wait() {
    if (!listener_.is_open()) return;
    listener_.async_wait(asio::posix::stream_descriptor::wait_read,
                         [self = shared_from_this()](const boost::system::error_code& ec) {
                           if (!ec) self->accept_all();
                         });
  }

  void accept_all() {
    static constexpr int burst = 256;  // then other connections get their turn
    for (int i = 0; i < burst; ++i) {
      sockaddr_storage address{};
      socklen_t size = sizeof address;
      UniqueFd fd(::accept4(listener_.native_handle(), reinterpret_cast<sockaddr*>(&address), &size,
                            SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) return pause();
        continue;  // this one connection failed (ECONNABORTED and the like)
      }
      try {
        take(std::move(fd), address);
      } catch (const std::exception& e) {
        log::warn(cat("cannot take a connection: ", std::string_view(e.what())));
      }
    }
    wait();
  }

  /// Out of descriptors or memory: the socket stays readable, so waiting for it would spin.
  void pause() {
    if (!paused_)
      log::warn(cat("cannot accept connections: ", std::system_category().message(errno), "; trying again"));
    paused_ = true;
    retry_.expires_after(std::chrono::milliseconds(100));
    retry_.async_wait([self = shared_from_this()](const boost::system::error_code& ec) {
      if (!ec) self->wait();
    });
  }

  void take(UniqueFd fd, const sockaddr_storage& address) {
    paused_ = false;
    const bool is_unix = address.ss_family == AF_UNIX;
    std::optional<PeerCredentials> credentials;
    if (is_unix) {
      credentials = peer_credentials(fd.get());
    } else {
      const int on = 1;  // losing either option costs latency or tidiness, not the connection
      ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      ::setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    }
    std::unique_ptr<TlsStream> tls;
    if (tls_) {
      if (full()) return;  // a refusal would need a handshake
      tls = std::make_unique<TlsStream>(tls_(), fd.get());
    }
    if (full()) return refuse(fd.get());
    const int family = is_unix ? AF_UNIX : address.ss_family;
    Session::Socket socket(asio::make_strand(context_->io));
    socket.assign(asio::generic::stream_protocol(family, is_unix ? 0 : IPPROTO_TCP), fd.get());
    fd.release();
    const auto session = std::make_shared<Session>(
        context_, std::move(socket), is_unix ? "unix" : address_text(address), credentials, std::move(tls));
    {
      const std::lock_guard lock(context_->mutex);
      context_->sessions.insert(session);
    }
    session->start();
  }

  bool full() const {
    const std::lock_guard lock(context_->mutex);
    return context_->sessions.size() >= context_->options.max_connections;
  }

  void refuse(int fd) {
    HttpResponse response =
        context_->describe(HttpRequest(), Error(Code::unavailable, "too many connections", "try again later"));
    response.status = 503;
    http::Head head;
    head.status = response.status;
    head.keep_alive = false;
    head.has_length = true;
    head.length = response.body.size();
    head.content_type = response.content_type;
    const std::string text = http::format_head(head, response.headers) + response.body;
    // Best effort: who cannot take a few hundred bytes at once gets none.
    [[maybe_unused]] const ssize_t n = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    ::shutdown(fd, SHUT_WR);
  }

  const std::shared_ptr<Context> context_;
  Strand strand_;
  asio::posix::stream_descriptor listener_;
  asio::steady_timer retry_;
  const std::string unix_path_;
  const Tls tls_;
  bool paused_ = false;
};

/// A task of HttpServer::every().
class Periodic : public std::enable_shared_from_this<Periodic> {
 public:
  Periodic(Context& context, std::chrono::milliseconds period, std::function<void()> task)
      : strand_(asio::make_strand(context.io)), timer_(strand_), period_(period), task_(std::move(task)) {}

  void start() {
    asio::post(strand_, [self = shared_from_this()] { self->schedule(); });
  }
  void stop() {
    asio::post(strand_, [self = shared_from_this()] {
      self->stopped_ = true;
      self->timer_.cancel();
    });
  }

 private:
  void schedule() {
    if (stopped_) return;
    timer_.expires_after(period_);
    timer_.async_wait([self = shared_from_this()](const boost::system::error_code& ec) {
      if (ec || self->stopped_) return;
      try {
        self->task_();
      } catch (const std::exception& e) {
        log::error(cat("periodic task: ", std::string_view(e.what())));
      }
      self->schedule();
    });
  }

  Strand strand_;
  asio::steady_timer timer_;
  const std::chrono::milliseconds period_;
  const std::function<void()> task_;
  bool stopped_ = false;
};

}  // namespace

struct HttpServer::Impl {
  explicit Impl(HttpServerOptions options) : context(std::make_shared<Context>(std::move(options))) {}

  void add(UniqueFd listener, const std::string& unix_path, Acceptor::Tls tls = {}) {
    acceptors.push_back(std::make_shared<Acceptor>(context, std::move(listener), unix_path, std::move(tls)));
    if (!threads.empty()) acceptors.back()->start();
  }

  void run() {
    block_sigpipe();
    while (true) {
      try {
        context->io.run();
        return;
      } catch (const std::exception& e) {  // a callback's; the others go on
        log::error(cat("http server: ", std::string_view(e.what())));
      }
    }
  }

  void close_sessions(bool only_idle) {
    std::vector<std::shared_ptr<Session>> sessions;
    {
      const std::lock_guard lock(context->mutex);
      sessions.assign(context->sessions.begin(), context->sessions.end());
    }
    for (const auto& session : sessions) session->post_close(only_idle);
  }

  std::shared_ptr<Context> context;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::vector<std::shared_ptr<Acceptor>> acceptors;
  std::mutex periodics_mutex;
  std::vector<std::shared_ptr<Periodic>> periodics;  ///< guarded by periodics_mutex
  std::vector<std::thread> threads;
};

HttpServer::HttpServer(HttpServerOptions options) {
  options.threads = std::max(options.threads, 1);
  impl_ = std::make_unique<Impl>(std::move(options));
}

HttpServer::~HttpServer() {
  stop(std::chrono::milliseconds(0));
}

void HttpServer::route(const std::string& method, const std::string& pattern, HttpHandler handler) {
  impl_->context->routes.add(method, pattern, std::move(handler));
}

void HttpServer::before(std::function<void(const HttpRequest&)> check) {
  impl_->context->before = std::move(check);
}

uint16_t HttpServer::listen_tcp(const std::string& address, uint16_t port) {
  UniqueFd listener = glm53::listen_tcp(address, port, 4096);
  const uint16_t bound = local_port(listener.get());
  impl_->add(std::move(listener), {});
  return bound;
}

void HttpServer::listen_unix(const std::string& path, int mode) {
  impl_->add(glm53::listen_unix(path, mode), path);
}

uint16_t HttpServer::listen_tls(const std::string& address, uint16_t port,
                                std::function<std::shared_ptr<const TlsServer>()> current) {
  UniqueFd listener = glm53::listen_tcp(address, port, 4096);
  const uint16_t bound = local_port(listener.get());
  impl_->add(std::move(listener), {}, std::move(current));
  return bound;
}

void HttpServer::start() {
  if (!impl_->threads.empty()) return;
  impl_->work.emplace(impl_->context->io.get_executor());
  for (const auto& acceptor : impl_->acceptors) acceptor->start();
  for (int i = 0; i < impl_->context->options.threads; ++i) {
    impl_->threads.emplace_back([impl = impl_.get()] { impl->run(); });
  }
}

void HttpServer::stop(std::chrono::milliseconds grace) {
  Impl& impl = *impl_;
  Context& context = *impl.context;
  if (context.stopped) return;
  for (const auto& thread : impl.threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      throw Error(Code::internal, "an HTTP server cannot be stopped from its own thread");
    }
  }
  context.stopping = true;
  if (impl.threads.empty()) {
    for (const auto& acceptor : impl.acceptors) acceptor->close_now();
    impl.acceptors.clear();
    // Handlers posted before start() own what owns the io_context; running them breaks the circle.
    context.io.poll();
    context.stopped = true;
    return;
  }
  for (const auto& acceptor : impl.acceptors) acceptor->close();
  {
    const std::lock_guard lock(impl.periodics_mutex);
    for (const auto& periodic : impl.periodics) periodic->stop();
    impl.periodics.clear();
  }
  impl.close_sessions(true);
  {
    std::unique_lock lock(context.mutex);
    context.fewer.wait_for(lock, grace, [&] { return context.sessions.empty(); });
  }
  impl.close_sessions(false);
  impl.work.reset();
  for (auto& thread : impl.threads) thread.join();
  impl.threads.clear();
  impl.acceptors.clear();
  context.stopped = true;
}

size_t HttpServer::connections() const {
  const std::lock_guard lock(impl_->context->mutex);
  return impl_->context->sessions.size();
}

void HttpServer::every(std::chrono::milliseconds period, std::function<void()> task) {
  auto periodic = std::make_shared<Periodic>(*impl_->context, period, std::move(task));
  const std::lock_guard lock(impl_->periodics_mutex);
  impl_->periodics.push_back(periodic);
  periodic->start();
}

}  // namespace glm53
