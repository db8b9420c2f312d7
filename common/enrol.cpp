#include "common/enrol.h"

#include <algorithm>
#include <chrono>

#include <nlohmann/json.hpp>

#include "common/config.h"
#include "common/error.h"
#include "common/file.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPrefix = "glm53";
constexpr size_t kSecret = 32, kFingerprint = 64;  // hex digits
constexpr std::chrono::milliseconds kConnect{5000}, kRead{15'000};

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

/// The PEM blocks of a text.
std::vector<std::string> blocks_of(const std::string& text) {
  std::vector<std::string> blocks;
  size_t at = text.find("-----BEGIN ");
  while (at != std::string::npos) {
    const size_t next = text.find("-----BEGIN ", at + 1);
    blocks.push_back(text.substr(at, next == std::string::npos ? next : next - at));
    at = next;
  }
  return blocks;
}

std::string member(const Json& json, const char* key) {
  const auto it = json.is_object() ? json.find(key) : json.end();
  return json.is_object() && it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
}

[[noreturn]] void refused(const HttpAnswer& answer) {
  Json error;
  try {
    error = parse_json(answer.body).value("error", Json::object());
  } catch (const std::exception&) {
    error = Json::object();
  }
  const std::string message = member(error, "message");
  throw Error(Code::denied,
              message.empty() ? cat("the head answered with HTTP status ", answer.status) : "the head says: " + message,
              member(error, "remedy"));
}

}  // namespace

Credentials load_credentials(const std::string& path) {
  const auto blocks = blocks_of(read_secret(path));
  const bool good = blocks.size() == 3 && blocks[0].starts_with("-----BEGIN PRIVATE KEY") &&
                    blocks[1].starts_with("-----BEGIN CERTIFICATE") && blocks[2].starts_with("-----BEGIN CERTIFICATE");
  if (!good) {
    throw Error(Code::config, cat("'", path, "' is not a member's file: a key, its certificate and the CA's"),
                "join the cluster again");
  }
  return {blocks[0], blocks[1], blocks[2]};
}

void save_credentials(const std::string& path, const Credentials& c) {
  write_file(path, cat(trim(c.key), "\n", trim(c.certificate), "\n", trim(c.ca), "\n"), 0600);
}

std::string JoinToken::text() const {
  return cat(kPrefix, "-", secret, "-", ca_fingerprint);
}

JoinToken JoinToken::parse(std::string_view text) {
  const auto parts = split(trim(text), '-');
  const bool good = parts.size() == 3 && parts[0] == kPrefix && parts[1].size() == kSecret &&
                    parts[2].size() == kFingerprint && is_hex(parts[1]) && is_hex(parts[2]);
  if (!good) {
    throw Error(Code::usage, "E717 this is no join token", "glm53ctl cluster token on the head prints one");
  }
  return {parts[1], parts[2]};
}

Credentials join_cluster(const std::string& head, const JoinToken& token, const TlsClock& clock) {
  log::add_secret(token.secret);
  const HostPort at = parse_host_port(head);
  TlsClientOptions options;
  options.ca_fingerprint = token.ca_fingerprint;
  options.server_role = "head";
  options.clock = clock;
  HttpClient http(cat("https://", at.host.find(':') == std::string::npos ? at.host : "[" + at.host + "]", ":", at.port),
                  {}, std::make_shared<TlsClient>(std::move(options)));
  http.set_timeout(kConnect, kRead);
  Credentials mine;
  mine.key = pki::make_key();
  const Json body{{"token", token.secret}, {"request", pki::make_request(mine.key)}};
  const HttpAnswer answer = http.request("POST", "/admin/v1/cluster/join", dump(body));
  if (answer.status != 200) refused(answer);
  const Json json = parse_json(answer.body);
  mine.certificate = member(json, "certificate");
  mine.ca = member(json, "ca");
  const bool right = !mine.ca.empty() && pki::read_certificate(mine.ca).fingerprint == token.ca_fingerprint &&
                     !mine.certificate.empty() && pki::belongs(mine.key, mine.certificate);
  if (!right) throw Error(Code::corrupt, "the head answered with a certificate that is not ours");
  return mine;
}

}  // namespace glm53
