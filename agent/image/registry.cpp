#include "agent/image/registry.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fcntl.h>
#include <optional>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <openssl/evp.h>

#include "agent/image/tree.h"
#include "common/digest.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

using hub::Action;
using hub::HubError;
constexpr int kMaxHops = 4, kMaxRefusals = 2;

std::string base64(const std::string& text) {
  std::string out(4 * ((text.size() + 2) / 3) + 1, '\0');
  const int n = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  out.resize(static_cast<size_t>(n));
  return out;
}

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

bool same_text(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

std::string host_of(const std::string& authority) {
  const size_t colon = authority.rfind(':');
  return colon == std::string::npos || authority.ends_with(']') ? authority : authority.substr(0, colon);
}

HubError fault(Action action, Code code, const std::string& text, std::string remedy = {}) {
  return {action, Error(code, text, std::move(remedy))};
}

}  // namespace

/// A partial blob that is written on; its digest so far.
struct Registry::Partial {
  UniqueFd fd;
  std::optional<Sha256> hash{std::in_place};
  int64_t size = 0;
  void restart();
  void open(const std::string& path, int64_t most);
  void write(std::string_view data);
};

void Registry::Partial::restart() {
  if (::ftruncate(fd.get(), 0) != 0) throw_errno(Code::unavailable, "image: cannot write a partial blob");
  hash.emplace();
  size = 0;
}

void Registry::Partial::open(const std::string& path, int64_t most) {
  fd = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!fd) throw_errno(Code::unavailable, cat("image: cannot write ", path));
  std::string buffer(size_t{1} << 20, '\0');
  while (true) {
    const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, cat("image: cannot read ", path));
    if (n == 0) break;
    hash->update({buffer.data(), static_cast<size_t>(n)});
    size += n;
  }
  if (size > most) restart();
}

void Registry::Partial::write(std::string_view data) {
  while (!data.empty()) {
    const ssize_t n = ::pwrite(fd.get(), data.data(), data.size(), static_cast<off_t>(size));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (errno == ENOSPC || errno == EDQUOT) {
        throw fault(Action::give_up, Code::unavailable, "E640 image: the disk is full", "make room and do it again");
      }
      throw_errno(Code::internal, "image: cannot write a blob");
    }
    hash->update(data.substr(0, static_cast<size_t>(n)));
    size += n;
    data.remove_prefix(static_cast<size_t>(n));
  }
}

Challenge parse_challenge(std::string_view header) {
  header = trim(header.substr(0, 8192));
  const size_t space = header.find(' ');
  Challenge c;
  c.scheme = header.substr(0, space);
  std::transform(c.scheme.begin(), c.scheme.end(), c.scheme.begin(),
                 [](unsigned char x) { return static_cast<char>(std::tolower(x)); });
  std::string_view rest = space == std::string_view::npos ? std::string_view() : header.substr(space + 1);
  while (!(rest = trim(rest)).empty()) {
    const size_t equal = rest.find('=');
    if (equal == std::string_view::npos) break;
    const std::string_view key = trim(rest.substr(0, equal));
    rest = trim(rest.substr(equal + 1));
    std::string value;
    if (rest.starts_with('"')) {
      const size_t close = rest.find('"', 1);
      if (close == std::string_view::npos) break;
      value = rest.substr(1, close - 1);
      rest.remove_prefix(close + 1);
    } else {
      const size_t comma = std::min(rest.find(','), rest.size());
      value = trim(rest.substr(0, comma));
      rest.remove_prefix(comma);
    }
    if (same_text(key, "realm")) c.realm = value;
    if (same_text(key, "service")) c.service = value;
    if (same_text(key, "scope")) c.scope = value;
    rest = trim(rest);
    if (rest.starts_with(',')) rest.remove_prefix(1);
  }
  if (c.scheme == "basic" || (c.scheme == "bearer" && !c.realm.empty())) return c;
  throw Error(Code::corrupt, "E658 image: the registry refuses and does not say how to sign in");
}

bool may_have_credentials(const std::string& registry, const hub::Url& realm) {
  const std::string host = host_of(registry);
  const bool here = host == "localhost" || host.starts_with("127.") || host == "[::1]";
  if (realm.scheme != "https" && !here) return false;
  if (realm.host == host) return true;
  const auto domain = [](const std::string& name) {
    const size_t dot = name.find('.');
    return dot == std::string::npos ? std::string() : name.substr(dot + 1);
  };
  const bool number = host.find_first_not_of("0123456789.:[]") == std::string::npos;
  return !number && !here && domain(host) == domain(realm.host) && domain(host).find('.') != std::string::npos;
}

Registry::Registry(Reference reference, RegistryOptions options)
    : reference_(std::move(reference)),
      options_(std::move(options)),
      home_(hub::parse_url(cat(reference_.scheme(), "://", reference_.registry, "/v2/"))),
      transport_(options_.transport) {}

std::vector<std::string> Registry::headers(const hub::Url& url) const {
  std::vector<std::string> all{
      cat("Accept: ", kManifestType, ", ", kIndexType, ", ", kDockerManifestType, ", ", kDockerIndexType)};
  // The token is the registry's: storage that it redirects to must not see it.
  if (!authorization_.empty() && url.authority() == home_.authority() && url.scheme == home_.scheme) {
    all.push_back("Authorization: " + authorization_);
  }
  return all;
}

HubError Registry::refusal(const hub::Head& head, const hub::Url& url) const {
  const int status = head.status;
  const std::string what = cat(reference_.registry, "/", reference_.repository);
  if (status == 429) {
    return {Action::wait, Error(Code::overloaded, cat("E627 image: rate limit of ", url.authority(), " reached")),
            hub::asked_wait(head)};
  }
  if (status == 408 || status >= 500) {
    return fault(Action::retry, Code::unavailable, cat("E628 image: ", url.authority(), " answered ", status));
  }
  if (url.authority() != home_.authority() && (status == 401 || status == 403)) {
    return fault(Action::refetch, Code::unavailable, cat("E629 image: ", url.authority(), " refused a signed URL"));
  }
  if (status == 401 || status == 403 || status == 404) {
    return fault(Action::give_up, status == 404 ? Code::not_found : Code::denied,
                 cat("E659 image: ", what, " was not found or may not be read (", status, ")"),
                 "check name and digest; for private images set engine.credentials_file");
  }
  return fault(Action::give_up, Code::unavailable,
               cat("E619 image: unexpected answer ", status, " of ", url.authority()));
}

/// Judges an answer of the registry that is no success; a 401 may get a token first.
void Registry::answer(const hub::Head& head, const hub::Url& url) {
  if (head.status != 401 || url.authority() != home_.authority() || ++refused_ > kMaxRefusals) throw refusal(head, url);
  const Challenge c = parse_challenge(head.header("WWW-Authenticate"));
  authorization_.clear();
  if (c.scheme == "basic") {
    if (options_.credentials.empty()) throw refusal(head, url);
    authorization_ = "Basic " + base64(options_.credentials);
    return;
  }
  const std::string scope = c.scope.empty() ? cat("repository:", reference_.repository, ":pull") : c.scope;
  const char separator = c.realm.find('?') == std::string::npos ? '?' : '&';
  const hub::Url realm = hub::parse_url(
      cat(c.realm, separator, "service=", hub::encode(c.service, false), "&scope=", hub::encode(scope, false)));
  if (realm.scheme != "https" && home_.scheme == "https") {
    throw Error(Code::denied, cat("E658 image: ", home_.authority(), " wants its token over plain HTTP"));
  }
  hub::Request request{.url = realm};
  if (!options_.credentials.empty() && may_have_credentials(reference_.registry, realm)) {
    request.headers.push_back("Authorization: Basic " + base64(options_.credentials));
  }
  const hub::Response response = transport_.request(request, size_t{1} << 20);
  if (response.head.status == 401 || response.head.status == 403) {
    throw fault(Action::give_up, Code::denied, cat("E658 image: ", realm.authority(), " gives no token"),
                "check engine.credentials_file");
  }
  if (response.head.status != 200) throw refusal(response.head, realm);
  std::string token;
  try {
    const auto json = parse_json(response.body, {.max_bytes = 1u << 20, .max_depth = 8});
    for (const char* key : {"access_token", "token"}) {
      if (json.is_object() && json.contains(key) && json[key].is_string()) token = json[key].get<std::string>();
    }
  } catch (const Error&) {
    // Said below, without the answer's text.
  }
  if (token.empty() || std::any_of(token.begin(), token.end(), [](unsigned char x) { return x <= 32 || x > 126; })) {
    throw Error(Code::corrupt, cat("E658 image: ", realm.authority(), " answers with something that is no token"));
  }
  authorization_ = "Bearer " + token;
}

hub::Response Registry::get(const std::string& path, size_t most) {
  hub::Retry retry(options_.retry, options_.transport.cancelled, options_.report);
  while (true) {
    try {
      hub::Url url = hub::parse_url(home_.full + path);
      for (int hop = 0; hop <= kMaxHops;) {
        hub::Response response = transport_.request({.url = url, .headers = headers(url)}, most);
        if (response.head.status == 200) {
          refused_ = 0;
          return response;
        }
        if (is_redirect(response.head.status)) {
          url = hub::resolve_url(url, std::string(response.head.header("Location")));
          ++hop;
        } else {
          answer(response.head, url);
        }
      }
      throw fault(Action::give_up, Code::unavailable, cat("E618 image: ", home_.authority(), " redirects in circles"));
    } catch (const Error& e) {
      retry.after(e);
    }
  }
}

std::string Registry::manifest(const std::string& name) {
  return get(cat(reference_.repository, "/manifests/", name), kMaxDocument).body;
}

std::string Registry::resolve(Store& store) {
  if (!reference_.digest.empty()) {
    document(store, {"", reference_.digest, -1}, true);
    return reference_.digest;
  }
  const std::string bytes = manifest(reference_.tag);
  const std::string digest = digest_of(bytes);
  (void)parse_document(bytes, reference_.registry + "/" + reference_.repository);
  store.put_document(digest, bytes);
  return digest;
}

void Registry::document(Store& store, const Descriptor& wanted, bool is_manifest) {
  try {
    (void)store.document(wanted.digest);
    return;
  } catch (const Error& e) {
    if (e.code() != Code::not_found && e.code() != Code::corrupt) throw;
  }
  const std::string bytes = is_manifest ? manifest(wanted.digest)
                                        : get(cat(reference_.repository, "/blobs/", wanted.digest), kMaxDocument).body;
  if (digest_of(bytes) != wanted.digest) {
    throw Error(Code::corrupt, cat("E650 image: ", reference_.registry, " sent other bytes than ", wanted.digest),
                "do not use this registry: a digest names content");
  }
  store.put_document(wanted.digest, bytes);
}

void Registry::pull(Store& store, const std::string& digest) {
  document(store, {"", digest, -1}, true);
  const Document d = parse_document(store.document(digest), digest);
  if (!d.manifest) document(store, choose(d.index, store.options().platform, digest).descriptor, true);
  const Manifest image = store.image_of(digest).second;
  document(store, image.config, false);
  // Before gigabytes are fetched: is it for this machine, and can it be unpacked?
  (void)parse_config(store.document(image.config.digest), image.layers.size(), digest);
  int64_t total = 0, before = 0;
  for (const Descriptor& layer : image.layers) {
    (void)packing_of(layer.media_type);
    total += layer.size;
  }
  for (const Descriptor& layer : image.layers) {
    blob(store, layer, before, total);
    before += layer.size;
  }
}

void Registry::blob(Store& store, const Descriptor& wanted, int64_t before, int64_t total) {
  if (store.has_blob(wanted) && hash_file(store.blob_path(wanted.digest), store.options().check) == wanted.digest)
    return;
  fetch(store, wanted, before, total);
}

/// One request for what is missing of a blob; whatever arrives is written.
hub::Head Registry::receive(const Store& store, const Descriptor& wanted, const hub::Url& url, Partial& partial,
                            bool& clean, hub::Retry& retry, const std::function<void(int64_t)>& progress) {
  const auto transfer = std::make_shared<hub::Transfer>();
  transfer->request = {.url = url, .headers = headers(url)};
  if (partial.size > 0) transfer->request.range = {partial.size, wanted.size - 1};
  transfer->on_head = [&](const hub::Head& head) {
    if (head.status != 200 && head.status != 206) return;
    refused_ = 0;
    if (head.status == 200 && partial.size > 0) {
      partial.restart();
      clean = true;
    }
    const std::string begin = cat("bytes ", partial.size, "-");
    if (head.status == 206 && !head.header("Content-Range").starts_with(begin)) {
      throw fault(Action::retry, Code::unavailable, cat("E616 image: ", url.authority(), " sent another part"));
    }
  };
  transfer->on_body = [&](std::string_view data) {
    if (transfer->head.status != 200 && transfer->head.status != 206) return;
    if (partial.size + static_cast<int64_t>(data.size()) > wanted.size) {
      throw fault(
          Action::give_up, Code::corrupt,
          cat("E650 image: ", url.authority(), " sends more than the ", wanted.size, " bytes of ", wanted.digest));
    }
    partial.write(data);
    retry.progress();
    progress(partial.size);
  };
  transport_.start(transfer);
  try {
    while (!transport_.wait(hub::Millis(1000))) {
      if (transport_.cancelled()) hub::throw_cancelled();
      store.options().check();
    }
  } catch (...) {
    transport_.clear();
    throw;
  }
  if (transfer->failed) std::rethrow_exception(transfer->failed);
  return transfer->head;
}

void Registry::fetch(const Store& store, const Descriptor& wanted, int64_t before, int64_t total) {
  const std::string path = store.blob_path(wanted.digest), name = path + ".partial";
  Partial partial;
  partial.open(name, wanted.size);
  hub::Retry retry(options_.retry, options_.transport.cancelled, options_.report);
  bool clean = partial.size == 0;
  while (true) {
    try {
      hub::Url url = hub::parse_url(cat(home_.full, reference_.repository, "/blobs/", wanted.digest));
      for (int hop = 0; partial.size < wanted.size;) {
        if (hop > kMaxHops) {
          throw fault(Action::give_up, Code::unavailable,
                      cat("E618 image: ", home_.authority(), " redirects in circles"));
        }
        const hub::Head head = receive(store, wanted, url, partial, clean, retry,
                                       [&](int64_t done) { options_.progress(before + done, total); });
        const int status = head.status;
        if (is_redirect(status)) {
          url = hub::resolve_url(url, std::string(head.header("Location")));
          ++hop;
        } else if (status != 200 && status != 206) {
          if (status == 416) {
            partial.restart();
            clean = true;
            continue;
          }
          answer(head, url);
        } else if (partial.size < wanted.size) {
          throw fault(Action::retry, Code::unavailable, cat("E635 image: ", url.authority(), " ended early"));
        }
      }
      if ("sha256:" + partial.hash->hex() == wanted.digest) break;
      partial.restart();
      // What an earlier run left may have been damaged; what came just now must not be.
      if (std::exchange(clean, true)) {
        (void)::unlink(name.c_str());
        throw fault(Action::give_up, Code::corrupt,
                    cat("E650 image: ", url.authority(), " sent other bytes than ", wanted.digest),
                    "do not use this registry: a digest names content");
      }
    } catch (const Error& e) {
      retry.after(e);
    }
  }
  if (::fsync(partial.fd.get()) != 0 || ::rename(name.c_str(), path.c_str()) != 0) {
    throw_errno(Code::unavailable, cat("image: cannot write ", path));
  }
}

}  // namespace glm53::image
