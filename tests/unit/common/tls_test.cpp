// The cluster's certificates and mutual TLS: who is let in, who is refused, and with which line.
#include "common/tls.h"

#include <atomic>
#include <memory>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/http_client.h"
#include "common/http_server.h"
#include "common/pki.h"
#include "common/strings.h"

using namespace glm53;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kNow = 1'800'000'000, kDay = 86'400;

struct Authority {
  std::string key = pki::make_key();
  std::string ca = pki::make_ca(key, "spark", {kNow - kDay, kNow + 3650 * kDay});
  struct Member {
    std::string key, certificate;
  };
  Member member(const std::string& role, const std::string& name, pki::Validity validity = {kNow - kDay, kNow + kDay}) {
    Member m;
    m.key = pki::make_key();
    m.certificate = pki::sign(key, ca, pki::make_request(m.key), {"spark", role, name}, validity);
    return m;
  }
};

/// Answers who asked, or why that one does not count.
class Server {
 public:
  explicit Server(Authority& authority, const Authority::Member& self)
      : tls_(std::make_shared<TlsServer>(self.certificate, self.key, authority.ca, [this] { return now.load(); })),
        http_(HttpServerOptions{}) {
    http_.route("GET", "/who", [](const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
      HttpResponse answer;
      const TlsPeer& peer = request.tls.value();
      answer.body = !peer.shown ? "nobody" : peer.problem.empty() ? peer.certificate.identity.text() : peer.problem;
      reply->send(std::move(answer));
    });
    http_.route("PUT", "/echo", [](const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
      HttpResponse answer;
      answer.body = request.body;
      reply->send(std::move(answer));
    });
    port = http_.listen_tls("127.0.0.1", 0, [this] { return tls_; });
    http_.start();
  }
  std::string url() const { return cat("https://127.0.0.1:", port); }
  std::atomic<int64_t> now{kNow};
  uint16_t port = 0;

 private:
  std::shared_ptr<const TlsServer> tls_;
  HttpServer http_;
};

std::shared_ptr<const TlsClient> client_of(const Authority& trusted, const Authority::Member& self,
                                           const std::string& role = "head", int64_t now = kNow) {
  TlsClientOptions options;
  options.certificate = self.certificate;
  options.key = self.key;
  options.ca = trusted.ca;
  options.server_role = role;
  options.clock = [now] { return now; };
  return std::make_shared<TlsClient>(options);
}

std::string ask(const Server& server, std::shared_ptr<const TlsClient> tls) {
  HttpClient http(server.url(), {}, std::move(tls));
  return http.request("GET", "/who").body;
}

std::string refusal(const Server& server, std::shared_ptr<const TlsClient> tls) {
  try {
    return "let in: " + ask(server, std::move(tls));
  } catch (const Error& e) {
    CHECK(e.code() == Code::denied);
    return e.what();
  }
}

}  // namespace

TEST_CASE("pki: a certificate says who, until when, and from which CA") {
  Authority authority;
  const auto alice = authority.member("operator", "alice");
  const pki::Certificate read = pki::read_certificate(alice.certificate);
  CHECK(read.identity.text() == "operator alice");
  CHECK(read.identity.cluster == "spark");
  CHECK(read.validity.until == kNow + kDay);
  CHECK(read.fingerprint.size() == 64);
  CHECK_FALSE(read.is_ca);
  CHECK(pki::read_certificate(authority.ca).is_ca);
  CHECK(pki::belongs(alice.key, alice.certificate));
  CHECK_FALSE(pki::belongs(authority.key, alice.certificate));
  CHECK(pki::time_text(0) == "1970-01-01 00:00:00 UTC");
  for (const char* bad : {"", "a/b", "..", "-x", "a b", "\xc3\xa4", "a,DNS:b"}) {
    CHECK_THROWS_AS(pki::check_name(bad, "a node"), Error);
    CHECK_THROWS_AS(authority.member("node", bad), Error);
  }
  CHECK_THROWS_AS(pki::read_certificate("nonsense"), Error);
  CHECK_THROWS_AS(pki::sign(authority.key, authority.ca, "nonsense", {"spark", "node", "n"}, {}), Error);
}

TEST_CASE("tls: both ends know each other, and bodies of any size pass") {
  Authority authority;
  Server server(authority, authority.member("head", "h"));
  CHECK(ask(server, client_of(authority, authority.member("operator", "alice"))) == "operator alice");
  HttpClient http(server.url(), {}, client_of(authority, authority.member("node", "w")));
  for (const size_t size : {size_t{0}, size_t{1}, size_t{16384}, size_t{16385}, size_t{5} << 20}) {
    const std::string body(size, 'x');
    CHECK(http.request("PUT", "/echo", body, "text/plain").body == body);
  }
}

TEST_CASE("tls: no certificate, an expired one, one of another cluster, one from the future") {
  Authority authority, other;
  Server server(authority, authority.member("head", "h"));
  TlsClientOptions bare;
  bare.ca = authority.ca;
  bare.clock = [] { return kNow; };
  CHECK(ask(server, std::make_shared<TlsClient>(bare)) == "nobody");
  CHECK(ask(server, client_of(authority, authority.member("node", "w", {kNow - 9 * kDay, kNow - 1}))) ==
        cat("E711 the certificate of node w expired at ", pki::time_text(kNow - 1), "; the clock here says ",
            pki::time_text(kNow)));
  CHECK(ask(server, client_of(authority, authority.member("node", "w", {kNow + 60, kNow + kDay}))) ==
        cat("E712 the certificate of node w counts from ", pki::time_text(kNow + 60), " on; the clock here says ",
            pki::time_text(kNow)));
  CHECK(ask(server, client_of(authority, other.member("node", "w"))) ==
        "E713 the certificate of node w is not of this cluster's CA");
}

TEST_CASE("tls: a certificate that expires on an open connection does not count any more") {
  Authority authority;
  Server server(authority, authority.member("head", "h"));
  HttpClient http(server.url(), {}, client_of(authority, authority.member("node", "w")));
  CHECK(http.request("GET", "/who").body == "node w");
  server.now = kNow + kDay + 1;
  CHECK(http.request("GET", "/who").body.starts_with("E711 "));
}

TEST_CASE("tls: a client refuses a server of another cluster, with another role, out of its time, or judged bad") {
  Authority authority, other;
  const auto alice = authority.member("operator", "alice");
  Server server(authority, authority.member("head", "h"));
  CHECK(refusal(server, client_of(other, alice)) ==
        cat(server.url(), ": E713 the certificate of head h is not of this cluster's CA"));
  CHECK(refusal(server, client_of(authority, alice, "node")) ==
        cat(server.url(), ": E719 head h answers there, not a node"));
  CHECK(refusal(server, client_of(authority, alice, "head", kNow + 2 * kDay))
            .starts_with(cat(server.url(), ": E711 the certificate of head h expired")));
  CHECK(refusal(server, client_of(authority, alice, "head", kNow - 2 * kDay))
            .starts_with(cat(server.url(), ": E712 the certificate of head h counts from")));
  TlsClientOptions options;
  options.ca = authority.ca;
  options.clock = [] { return kNow; };
  options.judge = [](const pki::Certificate& c) { return c.identity.name == "h" ? "E714 removed" : ""; };
  CHECK(refusal(server, std::make_shared<TlsClient>(options)) == cat(server.url(), ": E714 removed"));
  // An operator's certificate serves nobody.
  Server impostor(authority, alice);
  CHECK(refusal(impostor, client_of(authority, alice, "")).find("E713") != std::string::npos);
}

TEST_CASE("tls: a fingerprint finds the CA that the server brings along, and no other") {
  Authority authority, other;
  Server server(authority, authority.member("head", "h"));
  const auto pinned = [&](const Authority& a) {
    TlsClientOptions options;
    options.ca_fingerprint = pki::read_certificate(a.ca).fingerprint;
    options.clock = [] { return kNow; };
    return std::make_shared<TlsClient>(options);
  };
  CHECK(ask(server, pinned(authority)) == "nobody");
  CHECK(refusal(server, pinned(other)) ==
        cat(server.url(), ": E718 this is not the head that made the token: its CA is sha256:",
            pki::read_certificate(authority.ca).fingerprint,
            ", the token names sha256:", pki::read_certificate(other.ca).fingerprint));
}

TEST_CASE("tls: plain HTTP, TLS 1.2 and noise end at the door, and the server lives on") {
  Authority authority;
  Server server(authority, authority.member("head", "h"));
  HttpClient plain(cat("http://127.0.0.1:", server.port));
  plain.set_timeout(1s, 2s);
  CHECK_THROWS_AS(plain.request("GET", "/who"), Error);
  CHECK(ask(server, client_of(authority, authority.member("node", "w"))) == "node w");
}
