// The certificates of a cluster: EC P-256 keys, one CA, and who a certificate speaks for in its subject alternative
// name "glm53://CLUSTER/ROLE/NAME". Everything is PEM text; times are seconds since the epoch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace glm53::pki {

/// Who a certificate speaks for. Roles: head (the agent that commands), node (another agent), operator (a person who
/// may change the cluster), reader (one who may only look).
struct Identity {
  std::string cluster, role, name;
  /// "operator alice"
  std::string text() const { return role + " " + name; }
};
/// Names of clusters and of who is in them: letters, digits, dot, dash and underscore, 63 at most, none but letters and
/// digits first. Throws Error(usage) naming `what`.
void check_name(std::string_view name, std::string_view what);

struct Validity {
  int64_t from = 0, until = 0;
};
struct Certificate {
  Identity identity;        ///< empty in a CA's
  std::string fingerprint;  ///< SHA-256 of the certificate, hex
  Validity validity;
  bool is_ca = false;
};

/// A new private key; secret.
std::string make_key();
/// A self-signed CA certificate.
std::string make_ca(const std::string& key, const std::string& cluster, Validity validity);
/// A request for a certificate (PKCS#10). Who it is for is decided by the one who signs.
std::string make_request(const std::string& key);
/// Throws Error(usage) for text that is no request or is not signed by its own key.
std::string sign(const std::string& ca_key, const std::string& ca, const std::string& request, const Identity& identity,
                 Validity validity);
/// Throws Error(usage) for text that is no certificate.
Certificate read_certificate(const std::string& pem);
/// Whether the private key belongs to the certificate.
bool belongs(const std::string& key, const std::string& certificate);

/// "2026-12-01 10:00:00 UTC"
std::string time_text(int64_t seconds);

}  // namespace glm53::pki
