#include "engine/api/auth.h"

#include <algorithm>

#include <sys/stat.h>

#include "common/error.h"
#include "common/file.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::api {

namespace {

bool is_bearer(std::string_view scheme) {
  static constexpr std::string_view kBearer = "bearer";
  return std::equal(scheme.begin(), scheme.end(), kBearer.begin(), kBearer.end(),
                    [](char a, char b) { return (a | 0x20) == b; });
}

}  // namespace

namespace {

/// "requests_per_minute=60" into its place.
void set_limit(const std::string& word, const std::string& key, KeyLimits& limits) {
  const size_t equals = word.find('=');
  const std::string name = word.substr(0, equals);
  int64_t* place = nullptr;
  if (name == "requests_per_minute") place = &limits.requests_per_minute;
  if (name == "concurrent") place = &limits.concurrent;
  if (name == "tokens_per_minute") place = &limits.tokens_per_minute;
  if (name == "tokens_per_day") place = &limits.tokens_per_day;
  const auto value = equals == std::string::npos ? std::nullopt : parse_int(word.substr(equals + 1));
  if (place == nullptr || !value || *value < 1) {
    throw Error(Code::config, cat("API key file: what stands behind key '", key, "' is no limit"),
                "limits are requests_per_minute=N, concurrent=N, tokens_per_minute=N, tokens_per_day=N, N at least 1");
  }
  *place = *value;
}

}  // namespace

KeyRing::KeyRing(std::string_view content) {
  for (const std::string& line : split(content, '\n')) {
    std::vector<std::string> words;
    for (const std::string& word : split(line, ' ')) {
      if (!trim(word).empty()) words.emplace_back(trim(word));
    }
    if (words.empty() || words[0][0] == '#') continue;
    // "name: key" is two words.
    if (words[0].back() == ':' && words.size() > 1) {
      words[0] += words[1];
      words.erase(words.begin() + 1);
    }
    const std::string_view text = words[0];
    const size_t colon = text.find(':');
    Key key;
    if (colon == std::string_view::npos) {
      key = {cat("key", keys_.size() + 1), std::string(text), {}};
    } else {
      key = {std::string(trim(text.substr(0, colon))), std::string(trim(text.substr(colon + 1))), {}};
    }
    if (key.secret.empty()) throw Error(Code::config, cat("API key file: key '", key.name, "' is empty"));
    for (size_t i = 1; i < words.size(); ++i) set_limit(words[i], key.name, key.limits);
    if (std::any_of(keys_.begin(), keys_.end(), [&](const Key& k) { return k.name == key.name; })) {
      throw Error(Code::config, cat("API key file: the name '", key.name, "' is there twice"));
    }
    keys_.push_back(std::move(key));
  }
  if (keys_.empty()) {
    throw Error(Code::config, "API key file: there is no key in it",
                "write one key a line, or leave api.key_file empty");
  }
}

std::vector<std::string> KeyRing::secrets() const {
  std::vector<std::string> out;
  for (const Key& key : keys_) out.push_back(key.secret);
  return out;
}

std::optional<std::string> KeyRing::check(std::string_view authorization) const {
  const std::string_view header = trim(authorization);
  const size_t space = header.find(' ');
  if (space == std::string_view::npos || !is_bearer(header.substr(0, space))) return std::nullopt;
  return check_secret(trim(header.substr(space)));
}

std::optional<std::string> KeyRing::check_secret(std::string_view secret) const {
  std::optional<std::string> found;
  for (const Key& key : keys_) {
    // No early end: the time must not tell which key matched.
    if (equal_constant_time(key.secret, secret)) found = key.name;
  }
  return found;
}

KeyLimits KeyRing::limits(std::string_view name) const {
  const auto found = std::find_if(keys_.begin(), keys_.end(), [&](const Key& k) { return k.name == name; });
  return found == keys_.end() ? KeyLimits{} : found->limits;
}

KeyStore::KeyStore(KeyRing ring, std::string path)
    : path_(std::move(path)), ring_(std::make_shared<const KeyRing>(std::move(ring))) {
  if (!path_.empty()) stamp_ = stamp();
}

std::shared_ptr<const KeyRing> KeyStore::ring() const {
  const std::scoped_lock lock(mutex_);
  return ring_;
}

std::string KeyStore::stamp() const {
  struct stat s {};
  if (::stat(path_.c_str(), &s) != 0) return "gone";
  return cat(s.st_dev, " ", s.st_ino, " ", s.st_size, " ", s.st_mtim.tv_sec, ".", s.st_mtim.tv_nsec);
}

void KeyStore::follow() noexcept {
  try {
    if (path_.empty()) return;
    std::string now = stamp();
    {
      const std::scoped_lock lock(mutex_);
      if (now == stamp_) return;
      stamp_ = std::move(now);
    }
    try {
      auto ring = std::make_shared<const KeyRing>(read_secret(path_));
      for (std::string& secret : ring->secrets()) log::add_secret(std::move(secret));
      const std::scoped_lock lock(mutex_);
      ring_ = std::move(ring);
      log::info("the API keys were read again");
    } catch (const Error& e) {
      log::error(cat("the API keys stay as they are: ", e.line()));
    }
  } catch (const std::exception& e) {
    log::error(cat("the API key file could not be looked at: ", e.what()));
  }
}

bool is_open_path(std::string_view path, bool metrics_open) {
  if (path == "/metrics") return metrics_open;
  return path == "/health" || path == "/ready" || path == "/version" || path == "/ping" || path == "/openapi.json";
}

}  // namespace glm53::api
