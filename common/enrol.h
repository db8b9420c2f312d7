// How a machine or a person becomes a member of a cluster: a token from the head, bound to the head's CA, is exchanged
// for a certificate.
#pragma once

#include <string>
#include <string_view>

#include "common/tls.h"

namespace glm53 {

/// Key, certificate and CA of one member; PEM.
struct Credentials {
  std::string key, certificate, ca;
};
/// One file with the three, which only its owner may read. Throws Error(not_found), Error(config) for one that others
/// can read or that lacks a part.
Credentials load_credentials(const std::string& path);
/// Atomic and durable, mode 0600.
void save_credentials(const std::string& path, const Credentials& credentials);

/// "glm53-SECRET-FINGERPRINT": usable once, and only with the head whose CA has that fingerprint.
struct JoinToken {
  std::string secret, ca_fingerprint;
  std::string text() const;
  /// Throws Error(usage) E717; never repeats the text.
  static JoinToken parse(std::string_view text);
};

/// Joins by the head's admin API at "address:port". Throws Error(denied) E715 to E718, Error(unavailable).
Credentials join_cluster(const std::string& head, const JoinToken& token, const TlsClock& clock = tls_now);

}  // namespace glm53
