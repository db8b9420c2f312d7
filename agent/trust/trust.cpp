#include "agent/trust/trust.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::trust {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kDay = 86'400;
constexpr int64_t kCaDays = 3650, kNodeDays = 825, kPersonDays = 365;
/// A joining machine's clock may be behind this one by as much.
constexpr int64_t kBackdate = 600;
constexpr int64_t kLongestToken = 7 * kDay;
/// A used or expired token is remembered so long, to say which it was.
constexpr int64_t kRemember = 30 * kDay;
/// So long before its end a node's certificate is renewed.
constexpr int64_t kRenew = 30 * kDay;

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

Error no_certificate() {
  return {Code::unavailable, "E720 this node has no certificate yet",
          "glm53ctl cluster init on the head, glm53ctl cluster join on a worker"};
}

std::string text(const Json& json, const char* key) {
  const auto it = json.find(key);
  if (it == json.end() || !it->is_string()) throw Error(Code::corrupt, cat("no text '", std::string_view(key), "'"));
  return it->get<std::string>();
}

int64_t number(const Json& json, const char* key) {
  const auto it = json.find(key);
  if (it == json.end() || !it->is_number_integer())
    throw Error(Code::corrupt, cat("no number '", std::string_view(key), "'"));
  return it->get<int64_t>();
}

bool flag(const Json& json, const char* key) {
  const auto it = json.find(key);
  return it != json.end() && it->is_boolean() && it->get<bool>();
}

/// The CA's key and certificate.
struct Ca {
  std::string key, certificate;
};

Ca load_ca(const std::string& path) {
  const std::string pem = read_secret(path);
  const size_t at = pem.find("-----BEGIN CERTIFICATE");
  if (at == std::string::npos) throw Error(Code::config, cat("'", path, "' holds no CA"));
  return {pem.substr(0, at), pem.substr(at)};
}

}  // namespace

Trust::Trust(std::string folder, bool is_head, TlsClock clock)
    : folder_(std::move(folder)), is_head_(is_head), clock_(std::move(clock)) {
  load();
  load_self();
}

void Trust::load() {
  const std::string path = folder_ + "/members.json";
  if (!is_head_ || !exists(path)) return;
  try {
    const Json json = parse_json(read_file(path, size_t{1} << 20));
    for (const Json& m : json.at("members")) {
      members_.push_back({text(m, "name"), text(m, "role"), text(m, "fingerprint"),
                          m.contains("previous") ? text(m, "previous") : "", number(m, "issued_at"),
                          number(m, "expires_at"), flag(m, "removed")});
    }
    for (const Json& t : json.at("tokens")) {
      tokens_.push_back(
          {text(t, "digest"), text(t, "role"), text(t, "name"), number(t, "expires_at"), flag(t, "used")});
    }
  } catch (const std::exception& e) {
    throw Error(Code::config, cat("'", path, "' is damaged: ", std::string_view(e.what())),
                "bring it back from a backup, or remove the folder and begin with glm53ctl cluster init again");
  }
}

void Trust::load_self() {
  const std::string path = folder_ + "/self.pem";
  if (!exists(path)) return;
  self_ = load_credentials(path);
  server_ = std::make_shared<TlsServer>(self_->certificate, self_->key, self_->ca, clock_);
}

void Trust::save_locked() const {
  Json members = Json::array(), tokens = Json::array();
  for (const Member& m : members_) {
    members.push_back({{"name", m.name},
                       {"role", m.role},
                       {"fingerprint", m.fingerprint},
                       {"previous", m.previous},
                       {"issued_at", m.issued_at},
                       {"expires_at", m.expires_at},
                       {"removed", m.removed}});
  }
  for (const Token& t : tokens_) {
    tokens.push_back(
        {{"digest", t.digest}, {"role", t.role}, {"name", t.name}, {"expires_at", t.expires_at}, {"used", t.used}});
  }
  make_dirs(folder_, 0700);
  write_file(folder_ + "/members.json", dump({{"members", members}, {"tokens", tokens}}) + "\n", 0600);
}

void Trust::init(const std::string& cluster, const std::string& node) {
  pki::check_name(cluster, "a cluster (cluster.name)");
  pki::check_name(node, "a node (node.name)");
  const std::lock_guard lock(mutex_);
  if (!is_head_)
    throw Error(Code::usage, "this node is a worker", "the head makes the CA; here: glm53ctl cluster join");
  if (self_) throw Error(Code::busy, "this cluster has its CA already", "glm53ctl cluster show");
  make_dirs(folder_, 0700);
  const std::string ca_path = folder_ + "/ca.pem";
  const int64_t now = clock_();
  if (!exists(ca_path)) {  // else an earlier attempt ended between the two files
    const std::string key = pki::make_key();
    write_file(ca_path, key + pki::make_ca(key, cluster, {now - kBackdate, now + kCaDays * kDay}), 0600);
  }
  const Ca ca = load_ca(ca_path);
  Credentials mine;
  mine.key = pki::make_key();
  mine.ca = ca.certificate;
  mine.certificate = pki::sign(ca.key, ca.certificate, pki::make_request(mine.key), {cluster, "head", node},
                               {now - kBackdate, now + kCaDays * kDay});
  save_credentials(folder_ + "/self.pem", mine);
  load_self();
}

JoinToken Trust::make_token(const std::string& role, const std::string& name, int64_t seconds) {
  constexpr std::array<std::string_view, 3> kRoles{"node", "operator", "reader"};
  if (std::find(kRoles.begin(), kRoles.end(), role) == kRoles.end())
    throw Error(Code::usage, cat("'", role, "' is no role"), "node, operator or reader");
  pki::check_name(name, cat("a ", role));
  if (seconds < 1 || seconds > kLongestToken)
    throw Error(Code::usage, "a token is valid for one second to seven days", "--expires 1h");
  const std::lock_guard lock(mutex_);
  if (!self_ || !is_head_) throw no_certificate();
  const int64_t now = clock_();
  std::erase_if(tokens_, [&](const Token& t) { return t.expires_at + kRemember < now; });
  JoinToken token{random_hex(16), pki::read_certificate(self_->ca).fingerprint};
  log::add_secret(token.secret);
  tokens_.push_back({sha256_hex(token.secret), role, name, now + seconds, false});
  save_locked();
  return token;
}

Credentials Trust::admit(const std::string& secret, const std::string& request) {
  const std::string digest = sha256_hex(secret);
  const std::lock_guard lock(mutex_);
  if (!self_ || !is_head_) throw no_certificate();
  constexpr const char* kNewOne = "make a new one: glm53ctl cluster token on the head";
  const auto it = std::find_if(tokens_.begin(), tokens_.end(),
                               [&](const Token& t) { return equal_constant_time(t.digest, digest); });
  if (it == tokens_.end()) throw Error(Code::denied, "E717 this join token is not one of this head's", kNewOne);
  if (it->used) throw Error(Code::denied, "E715 this join token was used already", kNewOne);
  const int64_t now = clock_();
  if (now > it->expires_at) {
    throw Error(Code::denied,
                cat("E716 this join token expired at ", pki::time_text(it->expires_at), "; the head's clock says ",
                    pki::time_text(now)),
                kNewOne);
  }
  const Ca ca = load_ca(folder_ + "/ca.pem");
  const int64_t until = now + (it->role == "node" ? kNodeDays : kPersonDays) * kDay;
  const std::string cluster = pki::read_certificate(self_->certificate).identity.cluster;
  Credentials out;
  out.ca = ca.certificate;
  out.certificate = pki::sign(ca.key, ca.certificate, request, {cluster, it->role, it->name}, {now - kBackdate, until});
  const auto members = members_;
  const auto tokens = tokens_;
  std::erase_if(members_, [&](const Member& m) { return m.name == it->name && m.role == it->role; });
  members_.push_back({it->name, it->role, pki::read_certificate(out.certificate).fingerprint, {}, now, until, false});
  it->used = true;
  try {
    save_locked();  // before the certificate leaves: a token is never good twice
  } catch (...) {
    members_ = members;
    tokens_ = tokens;
    throw;
  }
  return out;
}

std::vector<Member> Trust::members() const {
  const std::lock_guard lock(mutex_);
  return members_;
}

std::vector<std::string> Trust::due() const {
  const std::lock_guard lock(mutex_);
  const int64_t now = clock_();
  std::vector<std::string> names;
  for (const Member& m : members_) {
    if (m.role != "node" || m.removed || now >= m.expires_at) continue;
    if (m.expires_at - now < kRenew || !m.previous.empty()) names.push_back(m.name);
  }
  return names;
}

std::string Trust::renew(const std::string& name, const std::string& current, const std::string& request) {
  const std::lock_guard lock(mutex_);
  if (!self_ || !is_head_) throw no_certificate();
  const auto before = members_;
  const auto it = std::find_if(members_.begin(), members_.end(), [&](const Member& m) {
    const bool shown = m.fingerprint == current || (!m.previous.empty() && m.previous == current);
    return m.name == name && m.role == "node" && !m.removed && shown;
  });
  if (it == members_.end()) throw Error(Code::not_found, cat("'", name, "' is no node with that certificate"));
  const Ca ca = load_ca(folder_ + "/ca.pem");
  const int64_t now = clock_(), until = now + kNodeDays * kDay;
  const std::string cluster = pki::read_certificate(self_->certificate).identity.cluster;
  std::string certificate =
      pki::sign(ca.key, ca.certificate, request, {cluster, "node", name}, {now - kBackdate, until});
  it->previous = current;
  it->fingerprint = pki::read_certificate(certificate).fingerprint;
  it->issued_at = now;
  it->expires_at = until;
  try {
    save_locked();
  } catch (...) {
    members_ = before;
    throw;
  }
  return certificate;
}

bool Trust::settle(const std::string& name, const std::string& current) {
  const std::lock_guard lock(mutex_);
  const auto it = std::find_if(members_.begin(), members_.end(), [&](const Member& m) {
    return m.name == name && m.fingerprint == current && !m.previous.empty();
  });
  if (it == members_.end()) return false;
  const std::string previous = std::exchange(it->previous, {});
  try {
    save_locked();
  } catch (...) {
    it->previous = previous;
    throw;
  }
  return true;
}

void Trust::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto before = members_;
  bool found = false;
  for (Member& m : members_) {
    if (m.name != name || m.removed) continue;
    m.removed = found = true;
  }
  if (!found) throw Error(Code::not_found, cat("'", name, "' is no member"), "glm53ctl node list names them");
  try {
    save_locked();
  } catch (...) {
    members_ = before;
    throw;
  }
}

void Trust::adopt(const Credentials& credentials) {
  const pki::Certificate own = pki::read_certificate(credentials.certificate);
  if (own.identity.role != "node") {
    throw Error(Code::usage, cat("the token was made for a ", own.identity.role, ", not for a node"),
                "glm53ctl cluster token --role node on the head");
  }
  const std::lock_guard lock(mutex_);
  if (is_head_) throw Error(Code::usage, "this node is the head", "join from the worker");
  make_dirs(folder_, 0700);
  save_credentials(folder_ + "/self.pem", credentials);
  load_self();
}

std::string Trust::next_request() {
  const std::lock_guard lock(mutex_);
  if (is_head_ || !self_) throw no_certificate();
  next_key_ = pki::make_key();
  return pki::make_request(next_key_);
}

void Trust::adopt_next(const std::string& certificate) {
  const pki::Certificate next = pki::read_certificate(certificate);
  const std::lock_guard lock(mutex_);
  if (is_head_ || !self_) throw no_certificate();
  const pki::Certificate mine = pki::read_certificate(self_->certificate);
  const bool same = next.identity.cluster == mine.identity.cluster && next.identity.role == mine.identity.role &&
                    next.identity.name == mine.identity.name;
  if (!same || next_key_.empty() || !pki::belongs(next_key_, certificate))
    throw Error(Code::usage, "this is not the certificate that this node asked for");
  save_credentials(folder_ + "/self.pem", {next_key_, certificate, self_->ca});
  next_key_.clear();
  load_self();
}

std::optional<pki::Certificate> Trust::own() const {
  const std::lock_guard lock(mutex_);
  return self_ ? std::optional(pki::read_certificate(self_->certificate)) : std::nullopt;
}

std::string Trust::cluster() const {
  const auto certificate = own();
  return certificate ? certificate->identity.cluster : std::string();
}

std::string Trust::ca_fingerprint() const {
  const std::lock_guard lock(mutex_);
  return self_ ? pki::read_certificate(self_->ca).fingerprint : std::string();
}

std::string Trust::unknown_locked(const pki::Certificate& certificate) const {
  if (!is_head_) return {};
  for (const Member& m : members_) {
    if (m.fingerprint != certificate.fingerprint && m.previous != certificate.fingerprint) continue;
    return m.removed ? cat("E714 ", certificate.identity.text(), " was removed from the cluster") : std::string();
  }
  return cat("E714 ", certificate.identity.text(), " is not a member of this cluster, or joined again since");
}

void Trust::authorize(const TlsPeer& peer, Right right) const {
  if (!peer.shown) {
    throw Error(Code::denied, "E710 this address asks for a certificate of the cluster",
                "glm53ctl cluster login for a person, glm53ctl cluster join for a node");
  }
  if (!peer.problem.empty()) throw Error(Code::denied, peer.problem, peer.remedy);
  const pki::Identity& who = peer.certificate.identity;
  if (!is_head_) {
    // A worker knows no list of members; it obeys one machine.
    if (who.role == "head") return;
    throw Error(Code::denied, cat("E719 a worker answers the head only, not ", who.text()), "ask the head's agent");
  }
  const std::lock_guard lock(mutex_);
  if (const std::string unknown = unknown_locked(peer.certificate); !unknown.empty())
    throw Error(Code::denied, unknown, "make a token with glm53ctl cluster token on the head, and join with it");
  const bool may = who.role == "operator" ? right != Right::command : right == Right::read && who.role == "reader";
  if (!may) throw Error(Code::denied, cat("E719 ", who.text(), " may not do that"), "ask an operator");
}

std::shared_ptr<const TlsServer> Trust::server() const {
  const std::lock_guard lock(mutex_);
  return server_;
}

std::shared_ptr<const TlsClient> Trust::client(const std::string& server_role) const {
  TlsClientOptions options;
  {
    const std::lock_guard lock(mutex_);
    if (!self_) throw no_certificate();
    options.certificate = self_->certificate;
    options.key = self_->key;
    options.ca = self_->ca;
  }
  options.server_role = server_role;
  options.clock = clock_;
  options.judge = [this](const pki::Certificate& server) {
    const std::lock_guard lock(mutex_);
    return unknown_locked(server);
  };
  return std::make_shared<TlsClient>(std::move(options));
}

}  // namespace glm53::trust
