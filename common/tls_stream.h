// TLS over non-blocking sockets, for the HTTP server, and the judgement of certificates, for both ends. Internal to
// common/.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/openssl.h"
#include "common/tls.h"

namespace glm53 {

/// Why the leaf does not count; empty when it does. `now` in seconds.
struct Judgement {
  std::string problem, remedy;
};
Judgement judge_certificate(X509* leaf, X509* ca, bool is_server, int64_t now);
std::string pem_of_certificate(X509* certificate);

struct TlsServer::Impl {
  openssl::Context context;
  openssl::Cert ca;
  TlsClock clock;
};

struct TlsClient::Impl {
  TlsClientOptions options;
  /// Makes a context of the HTTP library's show our certificate and trust only the cluster's. `why` is written when the
  /// server is refused, and must outlive the context.
  void prepare(SSL_CTX* context, Judgement* why) const;
  /// For the library's callback: judges the server of a handshake.
  Judgement judge(X509_STORE_CTX* handshake) const;
};

/// A server's end of one connection. Not thread-safe.
class TlsStream {
 public:
  enum class State { done, want_read, want_write, closed };
  struct Step {
    State state = State::closed;
    size_t bytes = 0;
  };
  TlsStream(std::shared_ptr<const TlsServer> server, int fd);
  /// The handshake is part of the first read.
  Step read(char* data, size_t size);
  Step write(const char* data, size_t size);
  /// Tells the other end that nothing more comes; best effort.
  void end();
  /// After the first byte was read. A certificate that expires meanwhile is noticed.
  TlsPeer peer();

 private:
  Step step(int result);
  const std::shared_ptr<const TlsServer> server_;
  openssl::Ssl ssl_;
  bool judged_ = false;
  TlsPeer peer_;
};

}  // namespace glm53
