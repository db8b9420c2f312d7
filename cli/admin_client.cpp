#include "cli/admin_client.h"

#include <nlohmann/json.hpp>

#include "common/config.h"
#include "common/enrol.h"
#include "common/file.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::ordered_json;

constexpr std::string_view kPrefix = "/admin/v1";
constexpr std::string_view kDefaultSocket = "/run/glm53/agent.sock";

std::string socket_of(const Config& config) {
  if (!config.text("admin.socket").empty()) return config.path("admin.socket");
  return config.path("paths.run") + "/agent.sock";
}

Code code_of_status(int status) {
  switch (status) {
    case 400:
      return Code::usage;
    case 401:
    case 403:
      return Code::denied;
    case 404:
      return Code::not_found;
    case 409:
      return Code::busy;
    case 429:
      return Code::overloaded;
    case 503:
      return Code::unavailable;
    default:
      return Code::internal;
  }
}

std::shared_ptr<const TlsClient> identity(const GlobalOptions& options) {
  const std::string path = identity_path(options);
  Credentials mine;
  try {
    mine = load_credentials(path);
  } catch (const Error& e) {
    if (e.code() != Code::not_found) throw;
    throw Error(Code::denied, cat("there is no certificate for https at '", path, "'"),
                "glm53ctl cluster login HEAD:PORT, with a token of glm53ctl cluster token --role operator");
  }
  TlsClientOptions tls;
  tls.certificate = mine.certificate;
  tls.key = mine.key;
  tls.ca = mine.ca;
  tls.server_role = "head";
  return std::make_shared<TlsClient>(std::move(tls));
}

}  // namespace

std::string identity_path(const GlobalOptions& options) {
  if (!options.identity.empty()) return options.identity;
  if (const auto base = environment("XDG_CONFIG_HOME"); base && !base->empty()) return *base + "/glm53/identity.pem";
  if (const auto home = environment("HOME"); home && !home->empty()) return *home + "/.config/glm53/identity.pem";
  throw Error(Code::usage, "HOME is not set", "name the file with --identity");
}

Target resolve_target(const GlobalOptions& options) {
  if (!options.url.empty() && !options.socket.empty()) {
    throw Error(Code::usage, "--url and --socket name two agents", "give one of them");
  }
  if (!options.url.empty()) {
    if (options.url.starts_with("https://")) {
      if (!options.token_file.empty())
        throw Error(Code::usage, "--token-file belongs to http; over TLS a certificate says who you are",
                    "glm53ctl cluster login");
      return {options.url, {}, identity(options)};
    }
    const std::string token = options.token_file.empty() ? std::string() : read_secret(options.token_file);
    return {options.url, token, nullptr};
  }
  if (!options.token_file.empty()) {
    throw Error(Code::usage, "--token-file belongs to --url; a unix socket asks for no token");
  }
  if (!options.socket.empty()) return {cat("unix:", options.socket), {}, nullptr};
  if (!options.config.empty()) return {cat("unix:", socket_of(Config::load(options.config))), {}, nullptr};
  return {cat("unix:", kDefaultSocket), {}, nullptr};
}

Code parse_code(std::string_view text) {
  for (int i = 0; i <= static_cast<int>(Code::internal); ++i) {
    const auto code = static_cast<Code>(i);
    if (name(code) == text) return code;
  }
  return Code::internal;
}

Error error_of_answer(int status, std::string_view body) {
  try {
    const Json json = parse_json(body);
    const Json& error = json.at("error");
    return {parse_code(error.value("code", "internal")), error.at("message").get<std::string>(),
            error.contains("remedy") && error.at("remedy").is_string() ? error.at("remedy").get<std::string>() : ""};
  } catch (const std::exception&) {
    return {code_of_status(status), cat("the agent answered with HTTP status ", status)};
  }
}

AdminClient::AdminClient(Target target)
    : target_(std::move(target)), http_(target_.endpoint, target_.token, target_.tls) {
  http_.set_timeout(3s, 60s);
}

Json AdminClient::get(std::string_view path) {
  return call("GET", path, {});
}

Json AdminClient::put(std::string_view path, const Json& body) {
  return call("PUT", path, dump(body));
}

Json AdminClient::post(std::string_view path, const Json& body) {
  return call("POST", path, dump(body));
}

Json AdminClient::remove(std::string_view path) {
  return call("DELETE", path, {});
}

Json AdminClient::call(std::string_view method, std::string_view path, std::string_view body) {
  HttpAnswer answer;
  try {
    answer = http_.request(method, cat(kPrefix, path), body);
  } catch (const Error& e) {
    rethrow(e);
  }
  if (answer.status < 200 || answer.status >= 300) throw error_of_answer(answer.status, answer.body);
  return parse_json(answer.body);
}

void AdminClient::stream(std::string_view path, const std::function<bool(std::string_view)>& chunk,
                         std::chrono::milliseconds silence) {
  HttpClient http(target_.endpoint, target_.token, target_.tls);
  http.set_timeout(3s, silence);
  HttpAnswer answer;
  try {
    answer = http.stream("GET", cat(kPrefix, path), {}, chunk);
  } catch (const Error& e) {
    rethrow(e);
  }
  if (answer.status < 200 || answer.status >= 300) throw error_of_answer(answer.status, answer.body);
}

void AdminClient::rethrow(const Error& error) const {
  if (error.code() != Code::unavailable && error.code() != Code::peer_lost) throw error;
  throw Error(Code::unavailable, cat("no agent answers at ", target_.endpoint, " (", error.what(), ")"),
              "start it (systemctl start glm53-agent), or name it with --config, --socket or --url");
}

}  // namespace glm53::cli
