#include "common/http_client.h"

#include <algorithm>
#include <csignal>
#include <ctime>
#include <httplib.h>
#include <utility>

#include <sys/socket.h>

#include "common/error.h"
#include "common/strings.h"
#include "common/tls_stream.h"

namespace glm53 {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxErrorBody = 1 << 20;

/// The library sends without MSG_NOSIGNAL: keeps SIGPIPE from the calling thread, and takes back one that was raised
/// meanwhile.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGPIPE);
    sigset_t pending;
    ::sigemptyset(&pending);
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;
  ~NoSigpipe() {
    const timespec at_once{0, 0};
    if (!was_pending_) ::sigtimedwait(&set_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t set_, before_;
  bool was_pending_ = false;
};

struct Endpoint {
  std::string host, host_header;  ///< host: the path of a unix socket
  int port = 80;
  bool is_unix = false, is_tls = false;
};

[[noreturn]] void throw_bad_endpoint(const std::string& text) {
  throw Error(Code::usage, cat("'", text, "' is not an HTTP endpoint"),
              "for example http://127.0.0.1:8888 or unix:/run/glm53/agent.sock");
}

Endpoint parse_endpoint(const std::string& text) {
  std::string_view rest = text;
  Endpoint e;
  if (rest.starts_with("unix:")) {
    rest.remove_prefix(5);
    if (rest.empty() || rest.find('\0') != std::string_view::npos) throw_bad_endpoint(text);
    e.is_unix = true;
    e.host = rest;
    e.host_header = "localhost";
    return e;
  }
  e.is_tls = rest.starts_with("https://");
  if (!e.is_tls && !rest.starts_with("http://")) throw_bad_endpoint(text);
  rest.remove_prefix(e.is_tls ? 8 : 7);
  if (e.is_tls) e.port = 443;
  if (rest.ends_with('/')) rest.remove_suffix(1);
  e.host_header = rest;
  std::string_view port;
  if (rest.starts_with('[')) {
    const size_t end = rest.find(']');
    if (end == std::string_view::npos) throw_bad_endpoint(text);
    e.host = rest.substr(1, end - 1);
    port = rest.substr(end + 1);
  } else {
    const size_t colon = std::min(rest.find(':'), rest.size());
    e.host = rest.substr(0, colon);
    port = rest.substr(colon);
  }
  if (!port.empty()) {
    const auto number = port[0] == ':' ? parse_int(port.substr(1)) : std::nullopt;
    if (!number || *number < 1 || *number > 65535) throw_bad_endpoint(text);
    e.port = static_cast<int>(*number);
  }
  const bool odd =
      std::any_of(rest.begin(), rest.end(), [](char c) { return static_cast<unsigned char>(c) <= ' ' || c == '/'; });
  if (e.host.empty() || odd) throw_bad_endpoint(text);
  return e;
}

httplib::Client make_client(const Endpoint& e) {
  if (!e.is_tls) return httplib::Client(e.host, e.port);
  const bool v6 = e.host.find(':') != std::string::npos;
  return httplib::Client(cat("https://", v6 ? "[" + e.host + "]" : e.host, ":", e.port));
}

bool has_control(std::string_view text, unsigned char most) {
  return std::any_of(text.begin(), text.end(),
                     [most](char c) { return static_cast<unsigned char>(c) <= most || c == 0x7F; });
}

}  // namespace

struct HttpClient::Impl {
  Impl(const std::string& text, const std::string& bearer_token, std::shared_ptr<const TlsClient> trust)
      : endpoint(parse_endpoint(text)), name(text), tls(std::move(trust)), client(make_client(endpoint)) {
    if (endpoint.is_unix) client.set_address_family(AF_UNIX);
    if (endpoint.is_tls) {
      if (!tls) throw Error(Code::usage, cat(name, " needs a certificate of the cluster"), "glm53ctl cluster join");
      // The library would look for a host's name in the certificate, and judge by the system's CAs.
      client.enable_server_certificate_verification(false);
      if (client.ssl_context() == nullptr) openssl::fail("making a TLS context");
      tls->impl().prepare(client.ssl_context(), &refused);
    }
    client.set_keep_alive(true);
    client.set_tcp_nodelay(true);
    client.set_url_encode(false);  // callers pass targets that are encoded already
    headers.emplace("Host", endpoint.host_header);
    if (has_control(bearer_token, 0x1F)) throw Error(Code::usage, "the bearer token has control characters");
    if (!bearer_token.empty()) headers.emplace("Authorization", cat("Bearer ", bearer_token));
    set_timeout(std::chrono::seconds(5), std::chrono::seconds(60));
  }

  void set_timeout(std::chrono::milliseconds connect, std::chrono::milliseconds read) {
    client.set_connection_timeout(connect);
    client.set_read_timeout(read);
    client.set_write_timeout(read);
    read_limit = read;
  }

  httplib::Request make(std::string_view method, std::string_view path, std::string_view body,
                        std::string_view content_type) const {
    if (!path.starts_with('/') || has_control(path, 0x20)) {
      throw Error(Code::usage, cat("'", path, "' is not a request target"),
                  "a percent-encoded path that begins with /");
    }
    httplib::Request request;
    request.method = method;
    request.path = path;
    request.headers = headers;
    if (!body.empty()) {
      request.body = body;
      request.headers.emplace("Content-Type", std::string(content_type));
    }
    return request;
  }

  [[noreturn]] void fail(httplib::Error error, Clock::time_point last_progress, bool answered) const {
    if (!refused.problem.empty()) throw Error(Code::denied, cat(name, ": ", refused.problem), refused.remedy);
    const std::string why = httplib::to_string(error);
    const bool reading = error == httplib::Error::Read || error == httplib::Error::Write;
    if (reading && Clock::now() - last_progress >= read_limit) {
      throw Error(Code::stalled, cat(name, " sent nothing for ", read_limit.count(), " ms"));
    }
    if (answered) throw Error(Code::peer_lost, cat("the answer of ", name, " ended early"));
    throw Error(Code::unavailable, cat("no answer from ", name, " (", why, ")"), "is it running?");
  }

  const Endpoint endpoint;
  const std::string name;
  const std::shared_ptr<const TlsClient> tls;
  Judgement refused;  ///< why the server was not trusted in the last handshake
  httplib::Client client;
  httplib::Headers headers;
  std::chrono::milliseconds read_limit{0};
};

namespace {

HttpAnswer answer_of(const httplib::Response& response) {
  HttpAnswer answer;
  answer.status = response.status;
  answer.body = response.body;
  answer.headers.assign(response.headers.begin(), response.headers.end());
  return answer;
}

}  // namespace

HttpClient::HttpClient(const std::string& endpoint, const std::string& bearer_token,
                       std::shared_ptr<const TlsClient> tls)
    : impl_(std::make_unique<Impl>(endpoint, bearer_token, std::move(tls))) {}
HttpClient::~HttpClient() = default;
HttpClient::HttpClient(HttpClient&&) noexcept = default;

void HttpClient::set_timeout(std::chrono::milliseconds connect, std::chrono::milliseconds read) {
  impl_->set_timeout(connect, read);
}

HttpAnswer HttpClient::request(std::string_view method, std::string_view path, std::string_view body,
                               std::string_view content_type) {
  const NoSigpipe guard;
  const httplib::Request request = impl_->make(method, path, body, content_type);
  for (int attempt = 0;; ++attempt) {
    const bool reused = impl_->client.is_socket_open() != 0;
    const auto begin = Clock::now();
    const httplib::Result result = impl_->client.send(request);
    if (result) return answer_of(*result);
    // The server may close a kept connection at the moment we use it again; only reading may be repeated.
    const bool stale =
        reused && attempt == 0 && (method == "GET" || method == "HEAD") && Clock::now() - begin < impl_->read_limit;
    if (!stale) impl_->fail(result.error(), begin, false);
  }
}

HttpAnswer HttpClient::stream(std::string_view method, std::string_view path, std::string_view body,
                              const std::function<bool(std::string_view)>& chunk) {
  const NoSigpipe guard;
  httplib::Request request = impl_->make(method, path, body, "application/json");
  HttpAnswer answer;
  bool answered = false;
  auto last_progress = Clock::now();
  std::exception_ptr thrown;
  request.response_handler = [&](const httplib::Response& response) {
    answer = answer_of(response);
    answered = true;
    last_progress = Clock::now();
    return true;
  };
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    last_progress = Clock::now();
    if (answer.status < 200 || answer.status > 299) {
      answer.body.append(data, std::min(size, kMaxErrorBody - std::min(kMaxErrorBody, answer.body.size())));
      return answer.body.size() < kMaxErrorBody;
    }
    try {
      return chunk({data, size});
    } catch (...) {  // not through the library
      thrown = std::current_exception();
      return false;
    }
  };
  const httplib::Result result = impl_->client.send(request);
  if (thrown) std::rethrow_exception(thrown);
  if (!result && result.error() != httplib::Error::Canceled) impl_->fail(result.error(), last_progress, answered);
  return answer;
}

void SseParser::feed(std::string_view bytes) {
  static constexpr size_t limit = size_t{64} << 20;
  while (!bytes.empty()) {
    if (after_cr_ && bytes.front() == '\n') bytes.remove_prefix(1);
    after_cr_ = false;
    const size_t end = bytes.find_first_of("\r\n");
    if (buffer_.size() + data_.size() + std::min(end, bytes.size()) > limit) {
      throw Error(Code::corrupt, "a server-sent event is larger than 64 MiB");
    }
    buffer_ += bytes.substr(0, end);
    if (end == std::string_view::npos) return;
    after_cr_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    const std::string text = std::exchange(buffer_, {});
    line(text);
  }
}

void SseParser::line(std::string_view text) {
  if (text.empty()) {
    const std::string name = std::exchange(name_, {}), data = std::exchange(data_, {});
    if (std::exchange(has_data_, false)) event_(name.empty() ? "message" : std::string_view(name), data);
    return;
  }
  const size_t colon = text.find(':');
  const std::string_view field = text.substr(0, colon);
  std::string_view value = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (field == "event") {
    name_ = value;
  } else if (field == "data") {
    if (has_data_) data_ += '\n';
    data_ += value;
    has_data_ = true;
  }  // comments (empty field), "id", "retry" and unknown fields mean nothing here
}

}  // namespace glm53
