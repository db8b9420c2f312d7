// Who belongs to the cluster. The head has the CA, signs certificates for one-time tokens and knows its members; a
// worker has its own certificate and believes the head only. Everything is in files of mode 0600 in one folder:
// ca.pem (key and certificate of the CA; head), self.pem (key, certificate and CA of this node), members.json.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/enrol.h"
#include "common/tls.h"

namespace glm53::trust {

struct Member {
  std::string name, role, fingerprint;
  std::string previous;  ///< fingerprint before a renewal that is not known to have arrived; counts too
  int64_t issued_at = 0, expires_at = 0;  ///< seconds since the epoch
  bool removed = false;
};

/// What a certificate is worth on this node; thrown as Error(denied) with its line.
enum class Right { read, operate, command };

/// Thread-safe. One object a folder writes.
class Trust {
 public:
  Trust(std::string folder, bool is_head, TlsClock clock = tls_now);

  // On the head.
  /// Makes the CA and this node's certificate. Throws Error(busy) when there is one.
  void init(const std::string& cluster, const std::string& node);
  /// A token for one certificate of that role (node, operator, reader) and name; replaces nothing until it is used.
  /// Throws Error(unavailable) E720 before init().
  JoinToken make_token(const std::string& role, const std::string& name, int64_t seconds);
  /// Uses the token up. Throws Error(denied) E715 used, E716 expired, E717 unknown; Error(usage) for a bad request.
  Credentials admit(const std::string& secret, const std::string& request);
  std::vector<Member> members() const;
  /// Nodes whose certificates are valid for less than 30 days, or were renewed without a word that they arrived.
  std::vector<std::string> due() const;
  /// A new certificate for the node that shows `current` now, for a request that came from it. Both count until
  /// settle(). Throws Error(not_found) for who is no node (any more), or another certificate.
  std::string renew(const std::string& name, const std::string& current, const std::string& request);
  /// The node shows `current`: if that is its newest, older ones do not count any more. True: something changed.
  bool settle(const std::string& name, const std::string& current);
  /// Its certificates do not count any more. Throws Error(not_found).
  void remove(const std::string& name);

  // On any node.
  /// After a join.
  void adopt(const Credentials& credentials);
  /// A request for the next certificate, with a new key. Throws Error(unavailable) E720.
  std::string next_request();
  /// The certificate for the last next_request(): from now on this node's. Throws Error(usage) for any other.
  void adopt_next(const std::string& certificate);
  /// nullopt before init() or a join.
  std::optional<pki::Certificate> own() const;
  std::string cluster() const;
  std::string ca_fingerprint() const;
  /// Throws Error(denied) E710 to E714, E719 unless the peer may do that here.
  void authorize(const TlsPeer& peer, Right right) const;
  /// nullptr before init() or a join.
  std::shared_ptr<const TlsServer> server() const;
  /// For connections to a node. Throws Error(unavailable) E720 before init().
  std::shared_ptr<const TlsClient> client(const std::string& server_role) const;

 private:
  struct Token {
    std::string digest, role, name;
    int64_t expires_at = 0;
    bool used = false;
  };
  void load();
  void save_locked() const;
  void load_self();
  /// E714 unless it is one of the members; empty when it is, or on a worker, which knows none.
  std::string unknown_locked(const pki::Certificate& certificate) const;

  const std::string folder_;
  const bool is_head_;
  const TlsClock clock_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<Member> members_;
  std::vector<Token> tokens_;
  std::optional<Credentials> self_;
  std::string next_key_;  ///< of next_request()
  std::shared_ptr<const TlsServer> server_;
};

}  // namespace glm53::trust
