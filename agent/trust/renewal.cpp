#include "agent/trust/renewal.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::trust {
namespace {

using Json = nlohmann::ordered_json;

std::string member(const Json& json, const char* name) {
  const auto it = json.is_object() ? json.find(name) : json.end();
  if (!json.is_object() || it == json.end() || !it->is_string())
    throw Error(Code::corrupt, cat("the worker's answer has no '", std::string_view(name), "'"));
  return it->get<std::string>();
}

Json asked(const Renewal::Ask& worker, const Json& body) {
  const Renewal::Answer answer = worker(dump(body));
  if (answer.status != 200) throw Error(Code::unavailable, cat("the worker answered with HTTP status ", answer.status));
  return parse_json(answer.body, {.max_bytes = 65536, .max_depth = 2});
}

}  // namespace

bool Renewal::tend(const Ask& worker) {
  if (!trust_) return false;
  const auto now = std::chrono::steady_clock::now();
  if (tried_ && now - *tried_ < pause_) return false;
  const auto names = trust_->due();
  if (names.empty()) return false;
  tried_ = now;
  const Json shown = asked(worker, Json::object());
  const std::string name = member(shown, "name"), current = member(shown, "fingerprint");
  if (std::find(names.begin(), names.end(), name) == names.end()) return false;
  if (trust_->settle(name, current)) return false;  // it has it; only its answer was lost
  const std::string certificate = trust_->renew(name, current, member(shown, "request"));
  asked(worker, {{"certificate", certificate}});
  const pki::Certificate next = pki::read_certificate(certificate);
  trust_->settle(name, next.fingerprint);
  log::info(cat("the certificate of node ", name, " was renewed, until ", pki::time_text(next.validity.until)));
  return true;
}

std::string renewal_answer(Trust& trust, const std::string& body) {
  const Json json = body.empty() ? Json::object() : parse_json(body, {.max_bytes = 65536, .max_depth = 2});
  if (!json.is_object()) throw Error(Code::usage, "the body must be a JSON object");
  std::string certificate;
  for (const auto& [key, value] : json.items()) {
    if (key != "certificate" || !value.is_string())
      throw Error(Code::usage, cat("member '", key, "' is unknown or no text"));
    certificate = value.get<std::string>();
  }
  Json request = nullptr;
  if (certificate.empty()) {
    request = trust.next_request();
  } else {
    trust.adopt_next(certificate);
  }
  const auto own = trust.own();
  if (!own) throw Error(Code::internal, "there is no certificate");
  return dump({{"name", own->identity.name}, {"fingerprint", own->fingerprint}, {"request", request}});
}

}  // namespace glm53::trust
