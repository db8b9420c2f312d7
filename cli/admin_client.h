// The agent as glm53ctl sees it: where it listens, and its answers as JSON or Error.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "common/error.h"
#include "common/http_client.h"

namespace glm53::cli {

/// Options that every command takes.
struct GlobalOptions {
  std::string socket{}, url{}, token_file{}, identity{}, config{};
  bool json = false;
};

/// Where an agent listens, and the token to show it ("" on a unix socket), or the certificate.
struct Target {
  std::string endpoint{}, token{};
  std::shared_ptr<const TlsClient> tls{};
};
/// Where `glm53ctl cluster login` keeps a person's key and certificate: --identity, else glm53/identity.pem in
/// XDG_CONFIG_HOME or ~/.config. Throws Error(usage) without a home.
std::string identity_path(const GlobalOptions& options);
/// --url (https with --identity, http with --token-file), else --socket, else the socket of --config, else
/// /run/glm53/agent.sock. Throws Error(usage) for contradictions and Error(config) for an unreadable file.
Target resolve_target(const GlobalOptions& options);

/// Code of its JSON name ("peer_lost"); internal when unknown.
Code parse_code(std::string_view name);
/// The Error in `{"error":{"code","message","remedy"}}`, or one made of the status when the body says nothing.
Error error_of_answer(int status, std::string_view body);

/// Calls under /admin/v1. Errors of the agent come as Error with their code; an agent that does not answer as
/// Error(unavailable) with the remedy.
class AdminClient {
 public:
  explicit AdminClient(Target target);
  nlohmann::ordered_json get(std::string_view path);
  nlohmann::ordered_json put(std::string_view path, const nlohmann::ordered_json& body);
  nlohmann::ordered_json post(std::string_view path, const nlohmann::ordered_json& body);
  nlohmann::ordered_json remove(std::string_view path);
  /// Streams a text or event body; `chunk` returns false to stop. Throws Error(stalled) when nothing comes for
  /// `silence`.
  void stream(std::string_view path, const std::function<bool(std::string_view)>& chunk,
              std::chrono::milliseconds silence = std::chrono::hours(1));
  const Target& target() const { return target_; }

 private:
  nlohmann::ordered_json call(std::string_view method, std::string_view path, std::string_view body);
  [[noreturn]] void rethrow(const Error& error) const;
  Target target_;
  HttpClient http_;
};

}  // namespace glm53::cli
