// Mutual TLS 1.3 between the machines of a cluster and its operators: who the other end is, judged by the cluster's CA
// (common/pki.h) and never by a host name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/pki.h"

namespace glm53 {

/// Seconds since the epoch; another clock in tests.
using TlsClock = std::function<int64_t()>;
int64_t tls_now();

/// The other end of a connection, as the server sees it.
struct TlsPeer {
  bool shown = false;  ///< it showed a certificate, and has its key
  pki::Certificate certificate;
  std::string problem, remedy;  ///< why the certificate does not count; empty when it does
};

/// Key and certificate of a server, and the CA that its peers' certificates must come from. Immutable, thread-safe.
class TlsServer {
 public:
  /// PEM texts. Throws Error(config).
  TlsServer(const std::string& certificate, const std::string& key, const std::string& ca, TlsClock clock = tls_now);
  ~TlsServer();
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct TlsClientOptions {
  std::string certificate, key;  ///< PEM; empty: none is shown
  std::string ca;                ///< PEM of the CA that the server's certificate must come from; or
  std::string ca_fingerprint;    ///< its fingerprint, where the server itself brings it along
  std::string server_role;       ///< "head" or "node": who the server must be
  /// A last look at the server's certificate: why it does not count, or "".
  std::function<std::string(const pki::Certificate&)> judge;
  TlsClock clock = tls_now;
};
/// What a client shows and whom it trusts. Immutable, thread-safe.
class TlsClient {
 public:
  /// Throws Error(config).
  explicit TlsClient(TlsClientOptions options);
  ~TlsClient();
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace glm53
