#include "common/tls.h"

#include <algorithm>
#include <climits>
#include <ctime>

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include "common/tls_stream.h"

namespace glm53 {

using namespace openssl;

namespace {

constexpr const char* kJoinAgain = "make a token with glm53ctl cluster token on the head, and join with it again";
constexpr const char* kSetClocks = "set both clocks (NTP); then join again if it is still refused";

/// For servers: the certificate is asked for and its key proven, what it is worth is judged afterwards.
int let_pass(int, X509_STORE_CTX*) {
  return 1;
}

void use_identity(SSL_CTX* context, const std::string& certificate, const std::string& key) {
  const Cert cert = read_cert(certificate);
  const Key secret = read_key(key);
  check(SSL_CTX_use_certificate(context, cert.get()), "SSL_CTX_use_certificate");
  if (SSL_CTX_use_PrivateKey(context, secret.get()) != 1 || SSL_CTX_check_private_key(context) != 1) {
    ERR_clear_error();
    throw Error(Code::config, "the private key does not belong to the certificate", kJoinAgain);
  }
}

std::string who(const pki::Certificate& c) {
  return c.identity.role.empty() ? "an unknown certificate" : "the certificate of " + c.identity.text();
}

Judgement refuse(int error, const pki::Certificate& c, int64_t now) {
  const std::string clock = cat("; the clock here says ", pki::time_text(now));
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return {cat("E711 ", who(c), " expired at ", pki::time_text(c.validity.until), clock), kJoinAgain};
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return {cat("E712 ", who(c), " counts from ", pki::time_text(c.validity.from), " on", clock), kSetClocks};
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      return {cat("E713 ", who(c), " is not of this cluster's CA"), kJoinAgain};
    default:
      return {cat("E713 ", who(c), " does not count: ", std::string_view(X509_verify_cert_error_string(error))),
              kJoinAgain};
  }
}

}  // namespace

int64_t tls_now() {
  return std::time(nullptr);
}

std::string pem_of_certificate(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (!bio || PEM_write_bio_X509(bio.get(), certificate) != 1) fail("writing PEM");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return {data, static_cast<size_t>(std::max(size, 0L))};
}

Judgement judge_certificate(X509* leaf, X509* ca, bool is_server, int64_t now) {
  const pki::Certificate read = pki::read_certificate(pem_of_certificate(leaf));
  const Store store(X509_STORE_new());
  const StoreContext context(X509_STORE_CTX_new());
  if (!store || !context) fail("X509_STORE_CTX_new");
  check(X509_STORE_add_cert(store.get(), ca), "X509_STORE_add_cert");
  check(X509_STORE_CTX_init(context.get(), store.get(), leaf, nullptr), "X509_STORE_CTX_init");
  X509_VERIFY_PARAM* const param = X509_STORE_CTX_get0_param(context.get());
  X509_VERIFY_PARAM_set_time(param, static_cast<time_t>(now));
  check(X509_VERIFY_PARAM_set_purpose(param, is_server ? X509_PURPOSE_SSL_SERVER : X509_PURPOSE_SSL_CLIENT), "purpose");
  if (X509_verify_cert(context.get()) != 1) {
    const int error = X509_STORE_CTX_get_error(context.get());
    ERR_clear_error();
    return refuse(error, read, now);
  }
  if (read.identity.role.empty()) return {"E713 the certificate names nobody of a cluster", kJoinAgain};
  return {};
}

TlsServer::TlsServer(const std::string& certificate, const std::string& key, const std::string& ca, TlsClock clock)
    : impl_(std::make_unique<Impl>()) {
  impl_->clock = std::move(clock);
  impl_->ca = read_cert(ca);
  impl_->context.reset(SSL_CTX_new(TLS_server_method()));
  SSL_CTX* const context = impl_->context.get();
  if (context == nullptr) fail("SSL_CTX_new");
  check(SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION), "TLS 1.3");
  use_identity(context, certificate, key);
  // Who joins has only the CA's fingerprint; it comes along.
  check(SSL_CTX_add1_chain_cert(context, impl_->ca.get()), "SSL_CTX_add1_chain_cert");
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, let_pass);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  check(SSL_CTX_set_num_tickets(context, 0), "SSL_CTX_set_num_tickets");
  SSL_CTX_set_mode(context,
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  // A close without a farewell is how most clients leave.
  SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_NO_RENEGOTIATION);
}

TlsServer::~TlsServer() = default;

TlsStream::TlsStream(std::shared_ptr<const TlsServer> server, int fd)
    : server_(std::move(server)), ssl_(SSL_new(server_->impl().context.get())) {
  if (!ssl_ || SSL_set_fd(ssl_.get(), fd) != 1) fail("SSL_new");
  SSL_set_accept_state(ssl_.get());
}

TlsStream::Step TlsStream::step(int result) {
  if (result > 0) return {State::done, static_cast<size_t>(result)};
  const int error = SSL_get_error(ssl_.get(), result);
  ERR_clear_error();
  if (error == SSL_ERROR_WANT_READ) return {State::want_read, 0};
  if (error == SSL_ERROR_WANT_WRITE) return {State::want_write, 0};
  return {};
}

TlsStream::Step TlsStream::read(char* data, size_t size) {
  ERR_clear_error();
  return step(SSL_read(ssl_.get(), data, static_cast<int>(std::min<size_t>(size, INT_MAX))));
}

TlsStream::Step TlsStream::write(const char* data, size_t size) {
  ERR_clear_error();
  return step(SSL_write(ssl_.get(), data, static_cast<int>(std::min<size_t>(size, INT_MAX))));
}

void TlsStream::end() {
  if (SSL_is_init_finished(ssl_.get())) SSL_shutdown(ssl_.get());
  ERR_clear_error();
}

TlsPeer TlsStream::peer() {
  const int64_t now = server_->impl().clock();
  if (!judged_) {
    judged_ = true;
    const Cert cert(SSL_get1_peer_certificate(ssl_.get()));
    if (cert) {
      peer_.shown = true;
      peer_.certificate = pki::read_certificate(pem_of_certificate(cert.get()));
      const Judgement judgement = judge_certificate(cert.get(), server_->impl().ca.get(), false, now);
      peer_.problem = judgement.problem;
      peer_.remedy = judgement.remedy;
    }
  }
  if (peer_.shown && peer_.problem.empty() && now > peer_.certificate.validity.until) {
    const Judgement late = refuse(X509_V_ERR_CERT_HAS_EXPIRED, peer_.certificate, now);
    peer_.problem = late.problem;
    peer_.remedy = late.remedy;
  }
  return peer_;
}

TlsClient::TlsClient(TlsClientOptions options) : impl_(std::make_unique<Impl>()) {
  if (options.ca.empty() == options.ca_fingerprint.empty()) {
    throw Error(Code::internal, "a TLS client needs a CA or a CA's fingerprint");
  }
  if (!options.ca.empty()) (void)read_cert(options.ca);
  if (!options.certificate.empty() && !pki::belongs(options.key, options.certificate)) {
    throw Error(Code::config, "the private key does not belong to the certificate", kJoinAgain);
  }
  impl_->options = std::move(options);
}

TlsClient::~TlsClient() = default;

namespace {

/// The library's context has one argument for the callback; client and answer travel together.
struct Handshake {
  const TlsClient::Impl* client;
  Judgement* why;
};

void free_handshake(void*, void* pointer, CRYPTO_EX_DATA*, int, long, void*) {
  const std::unique_ptr<Handshake> owner(static_cast<Handshake*>(pointer));
}

int handshake_slot() {
  static const int slot = SSL_CTX_get_ex_new_index(0, nullptr, nullptr, nullptr, free_handshake);
  return slot;
}

int judge_server(X509_STORE_CTX* context, void* argument) {
  const auto* const handshake = static_cast<const Handshake*>(argument);
  try {
    *handshake->why = handshake->client->judge(context);
  } catch (const std::exception& e) {
    *handshake->why = {cat("the server's certificate cannot be judged: ", std::string_view(e.what())), {}};
  }
  const bool good = handshake->why->problem.empty();
  X509_STORE_CTX_set_error(context, good ? X509_V_OK : X509_V_ERR_APPLICATION_VERIFICATION);
  return good ? 1 : 0;
}

}  // namespace

void TlsClient::Impl::prepare(SSL_CTX* context, Judgement* why) const {
  check(SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION), "TLS 1.3");
  if (!options.certificate.empty()) use_identity(context, options.certificate, options.key);
  auto handshake = std::make_unique<Handshake>(Handshake{this, why});
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_cert_verify_callback(context, judge_server, handshake.get());
  check(SSL_CTX_set_ex_data(context, handshake_slot(), handshake.get()), "SSL_CTX_set_ex_data");
  // The context owns it now, and frees it at its end.
  (void)handshake.release();  // NOLINT(bugprone-unused-return-value)
}

Judgement TlsClient::Impl::judge(X509_STORE_CTX* handshake) const {
  X509* const leaf = X509_STORE_CTX_get0_cert(handshake);
  if (leaf == nullptr) return {"E713 the server shows no certificate", {}};
  Cert ca;
  std::string seen = "none";
  if (!options.ca.empty()) {
    ca = read_cert(options.ca);
  } else {
    STACK_OF(X509)* const chain = X509_STORE_CTX_get0_untrusted(handshake);
    for (int i = 0; chain != nullptr && i < sk_X509_num(chain); ++i) {
      const std::string pem = pem_of_certificate(sk_X509_value(chain, i));
      const pki::Certificate one = pki::read_certificate(pem);
      if (one.is_ca) seen = "sha256:" + one.fingerprint;
      if (one.is_ca && one.fingerprint == options.ca_fingerprint) ca = read_cert(pem);
    }
    if (!ca) {
      return {cat("E718 this is not the head that made the token: its CA is ", seen,
                  ", the token names sha256:", options.ca_fingerprint),
              "check the address, and make a new token on the head"};
    }
  }
  Judgement judgement = judge_certificate(leaf, ca.get(), true, options.clock());
  if (!judgement.problem.empty()) return judgement;
  const pki::Certificate server = pki::read_certificate(pem_of_certificate(leaf));
  if (!options.server_role.empty() && server.identity.role != options.server_role) {
    return {cat("E719 ", server.identity.text(), " answers there, not a ", options.server_role), "check the address"};
  }
  if (options.judge) judgement.problem = options.judge(server);
  return judgement;
}

}  // namespace glm53
