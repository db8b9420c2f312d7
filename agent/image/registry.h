// A registry's protocol (OCI distribution specification 1.1): token, manifests, blobs. Only bytes that match a digest
// are kept; a tag is asked for once and becomes a digest.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "agent/hub/client.h"
#include "agent/hub/transport.h"
#include "agent/image/store.h"

namespace glm53::image {

/// "Bearer realm=…,service=…,scope=…" of a WWW-Authenticate header.
struct Challenge {
  std::string scheme;  ///< "bearer" or "basic", in lower case
  std::string realm, service, scope;
};
/// Throws Error(corrupt) for what is none.
Challenge parse_challenge(std::string_view header);
/// True when the credentials for `registry` may go to a token server: over TLS (or on this machine), and the same host
/// or one of the same domain.
bool may_have_credentials(const std::string& registry, const hub::Url& realm);

struct RegistryOptions {
  std::string credentials;  ///< "user:password", "" = none; never logged
  hub::TransportOptions transport;
  hub::RetryOptions retry;
  std::function<void(const std::string&)> report = [](const std::string&) {};
  /// Bytes of the blob at work and of all.
  std::function<void(int64_t done, int64_t total)> progress = [](int64_t, int64_t) {};
};

/// Pulls images into a store. One object a thread.
class Registry {
 public:
  Registry(Reference reference, RegistryOptions options);
  /// The digest that the reference names now; the document is in `store` then. Asks the registry only when the store
  /// does not have it.
  std::string resolve(Store& store);
  /// Everything that the image behind a digest needs. Goes on where an earlier pull stopped.
  void pull(Store& store, const std::string& digest);

 private:
  std::string manifest(const std::string& name);
  void document(Store& store, const Descriptor& wanted, bool manifest);
  void blob(Store& store, const Descriptor& wanted, int64_t before, int64_t total);
  void fetch(const Store& store, const Descriptor& wanted, int64_t before, int64_t total);
  struct Partial;
  hub::Head receive(const Store& store, const Descriptor& wanted, const hub::Url& url, Partial& partial, bool& clean,
                    hub::Retry& retry, const std::function<void(int64_t)>& progress);
  hub::Response get(const std::string& path, size_t most);
  void answer(const hub::Head& head, const hub::Url& url);
  std::vector<std::string> headers(const hub::Url& url) const;
  hub::HubError refusal(const hub::Head& head, const hub::Url& url) const;

  const Reference reference_;
  const RegistryOptions options_;
  const hub::Url home_;
  hub::Transport transport_;
  std::string authorization_;  ///< "Bearer …" or "Basic …", for home_ only
  int refused_ = 0;            ///< 401 in a row
};

}  // namespace glm53::image
