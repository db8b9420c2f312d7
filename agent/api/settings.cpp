#include "agent/api/settings.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include <arpa/inet.h>
#include <nlohmann/json.hpp>

#include "agent/api/hub_models.h"
#include "agent/image/store.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/process.h"
#include "common/strings.h"
#include "common/version.h"

extern char** environ;

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

/// Room for "/notify/rank1023.4294967295" within a unix socket's path.
constexpr size_t kLongestRunDir = 78;

/// Cluster keys that name files: made absolute before they travel.
constexpr std::string_view kPathKeys[] = {"model.path", "draft.path", "api.key_file"};

std::string absolute(const Config& config, std::string_view key) {
  const std::string& text = config.text(key);
  return text.empty() ? text : std::filesystem::absolute(config.path(key)).lexically_normal().string();
}

std::string own_token(const Config& config) {
  if (config.text("admin.token_file").empty()) return {};
  std::string token = read_secret(absolute(config, "admin.token_file"));
  if (token.empty()) throw Error(Code::config, "admin.token_file names an empty file");
  log::add_secret(token);
  return token;
}

void check_listen(const AgentSettings& settings, const Config& config) {
  if (!settings.admin_listen) return;
  const std::string& where = config.source("admin.listen");
  if (settings.admin_tls) return;
  if (!is_loopback(settings.admin_listen->host)) {
    throw Error(Code::config,
                cat("admin.listen = \"", config.text("admin.listen"), "\" is no loopback address (", where,
                    "), and admin.tls is off (", config.source("admin.tls"), ")"),
                "leave admin.tls at auto: other machines are answered over TLS only");
  }
  if (settings.admin_token.empty()) {
    throw Error(Code::config, cat("admin.listen is set without admin.token_file (", where, ")"),
                "write a token to a file of mode 0600 and name it in admin.token_file");
  }
}

bool wants_tls(const Config& config, const std::string& host) {
  const std::string& tls = config.text("admin.tls");
  return tls == "on" || (tls == "auto" && !is_loopback(host));
}

int ranks_here(const Config& cluster, const std::string& node) {
  // Two agents on one machine (worker on a loopback address) share its cores.
  const bool shared = is_loopback(cluster.text("worker.fabric_address"));
  const auto places = parse_ranks(cluster);
  const auto n =
      std::count_if(places.begin(), places.end(), [&](const RankPlace& p) { return shared || p.node == node; });
  return std::max(1, static_cast<int>(n));
}

}  // namespace

bool is_loopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

AgentSettings agent_settings(const Config& config) {
  AgentSettings s;
  s.role = config.text("node.role");
  s.name = config.text("node.name").empty() ? s.role : config.text("node.name");
  s.address = config.text(s.role == "head" ? "head.fabric_address" : "worker.fabric_address");
  s.state_dir = absolute(config, "paths.state");
  s.run_dir = absolute(config, "paths.run");
  s.logs_dir = absolute(config, "paths.logs");
  s.hub_cache =
      (config.text("hub.home").empty() ? s.state_dir + "/huggingface" : absolute(config, "hub.home")) + "/hub";
  if (s.run_dir.size() > kLongestRunDir) {
    throw Error(Code::config, cat("paths.run = \"", s.run_dir, "\" is longer than ", kLongestRunDir, " bytes"),
                "sockets live there and their paths are short; choose a shorter folder");
  }
  s.admin_socket = config.text("admin.socket").empty() ? s.run_dir + "/agent.sock" : absolute(config, "admin.socket");
  if (!config.text("admin.listen").empty()) s.admin_listen = parse_host_port(config.text("admin.listen"));
  s.admin_tls = s.admin_listen && wants_tls(config, s.admin_listen->host);
  s.trust_dir = s.state_dir + "/tls";
  s.admin_token = own_token(config);
  check_listen(s, config);
  s.log_max_bytes = static_cast<uint64_t>(config.integer("log.max_bytes"));
  s.keep_generations = static_cast<int>(config.integer("log.keep_generations"));
  if (!config.text("engine.path").empty()) s.engine_path = absolute(config, "engine.path");
  s.engine_store = config.text("engine.store").empty() ? s.state_dir + "/engines" : absolute(config, "engine.store");
  if (!config.text("engine.rank_path").empty()) s.rank_path = absolute(config, "engine.rank_path");
  s.threads = static_cast<int>(config.integer("engine.threads"));
  s.log_level = config.text("log.level");
  return s;
}

std::string AgentSettings::engine() const {
  if (!engine_path.empty()) return engine_path;
  return image::active_program(engine_store).value_or(executable_dir() + "/glm53-engine");
}

Effective make_effective(Config file, const std::map<std::string, std::string>& settings) {
  for (const auto& [key, value] : settings) {
    for (const ConfigKey& known : config_keys()) {
      if (known.name == key && known.scope == KeyScope::node) {
        throw Error(Code::usage, cat(key, " belongs to one machine"), "set it in that machine's file");
      }
    }
    file.set(key, value, "--set");
  }
  Json flat = file.to_json(true);
  for (const std::string_view key : kPathKeys) flat[std::string(key)] = absolute(file, key);
  if (!file.list("api.cors_origins").empty()) {
    throw Error(
        Code::config,
        cat("api.cors_origins is set (", file.source("api.cors_origins"), "), but this version sends no CORS headers"),
        "leave it empty, and let a proxy before the API add them");
  }
  const auto places = parse_ranks(file);
  if (places.empty() || places.front().node != "head") {
    throw Error(Code::config, "topology.ranks must begin with a rank on the head",
                "topology.ranks = [\"head:0\", \"worker:0\"]");
  }
  for (const RankPlace& place : places) {
    if (place.node != "head" && place.node != "worker") {
      throw Error(Code::config, cat("topology.ranks names node '", place.node, "'"), "nodes are head and worker");
    }
    if (place.node == "worker" && file.text("worker.admin").empty()) {
      throw Error(Code::config, "topology.ranks names the worker, but worker.admin is empty",
                  "set worker.admin to the address of the worker's agent, or topology.ranks = [\"head:0\"]");
    }
  }
  return restore_effective(dump(flat));
}

Effective restore_effective(const std::string& json) {
  Effective e;
  e.config = Config::from_json(parse_json(json), "effective configuration");
  e.json = dump(e.config.to_json(true));
  e.hash = e.config.hash();
  return e;
}

reconcile::Limits limits_of(const Config& config) {
  reconcile::Limits limits;
  limits.ready_timeout = config.duration("ranks.ready_timeout");
  limits.stall_timeout = config.duration("ranks.stall_timeout");
  limits.watchdog = config.duration("ranks.watchdog");
  limits.max_restarts = static_cast<int>(config.integer("ranks.max_restarts"));
  return limits;
}

std::optional<WorkerAddress> worker_address(const Config& file, const AgentSettings& own) {
  const std::string& admin = file.text("worker.admin");
  if (admin.empty()) return std::nullopt;
  const HostPort at = parse_host_port(admin);
  const bool tls = wants_tls(file, at.host);
  if (!tls && !is_loopback(at.host)) {
    // The token and everything else would go over the network as it is.
    throw Error(Code::config,
                cat("worker.admin = \"", admin, "\" is no loopback address (", file.source("worker.admin"),
                    "), and admin.tls is off (", file.source("admin.tls"), ")"),
                "leave admin.tls at auto: other machines are reached over TLS only");
  }
  WorkerAddress address;
  address.endpoint = cat(tls ? "https://" : "http://",
                         at.host.find(':') == std::string::npos ? at.host : "[" + at.host + "]", ":", at.port);
  if (tls) {
    address.trust = own.trust;
    return address;
  }
  address.token =
      file.text("worker.token_file").empty() ? own.admin_token : read_secret(absolute(file, "worker.token_file"));
  if (address.token.empty()) {
    throw Error(Code::config, "worker.admin is set, but there is no token for it",
                "set worker.token_file or admin.token_file");
  }
  log::add_secret(address.token);
  return address;
}

HttpClient WorkerAddress::connect() const {
  if (!endpoint.starts_with("https://")) return HttpClient(endpoint, token);
  if (!trust) throw Error(Code::internal, "only a running agent speaks to the worker");
  return HttpClient(endpoint, {}, trust->client("node"));
}

RankConfig rank_config(const Effective& effective, int rank, uint64_t generation) {
  const Config& c = effective.config;
  const auto places = parse_ranks(c);
  const RankPlace& place = places.at(static_cast<size_t>(rank));
  RankConfig r;
  r.generation = generation;
  r.rank = rank;
  r.size = static_cast<int>(places.size());
  r.device = place.device;
  r.node = place.node;
  r.rendezvous_host = c.text("head.fabric_address");
  r.rendezvous_port = static_cast<uint16_t>(c.integer("ranks.port"));
  r.bind_address = c.text(place.node == "head" ? "head.fabric_address" : "worker.fabric_address");
  r.config_hash = effective.hash;
  r.config_json = effective.json;
  return r;
}

RankConfig localize(RankConfig config, const AgentSettings& settings) {
  config.admin_socket = cat(settings.run_dir, "/rank", config.rank, ".sock");
  config.api_socket = config.rank == 0 ? settings.run_dir + "/ranks.sock" : "";
  Json flat = with_local_models(parse_json(config.config_json), settings.hub_cache);
  int threads = settings.threads;
  if (threads == 0) {
    const Config cluster = Config::from_json(flat, "configuration of the rank");
    threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks_here(cluster, settings.role));
  }
  flat["engine.threads"] = threads;
  config.config_json = dump(flat);
  return config;
}

ApiConfig api_config(const Effective& effective, const AgentSettings& settings) {
  ApiConfig a;
  a.rank_socket = settings.run_dir + "/ranks.sock";
  a.admin_socket = settings.run_dir + "/api.sock";
  a.bind = effective.config.text("api.bind");
  a.port = static_cast<uint16_t>(effective.config.integer("api.port"));
  a.version = std::string(version());
  a.config_json = dump(with_local_models(parse_json(effective.json), settings.hub_cache));
  return a;
}

std::map<std::string, std::string> child_environment(bool gpu) {
  std::map<std::string, std::string> env{{"PATH", "/usr/local/bin:/usr/bin:/bin"}};
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry(*at);
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view key = entry.substr(0, equals);
    const bool plain = key == "PATH" || key == "HOME" || key == "TMPDIR";
    const bool device = gpu && (key.starts_with("NCCL_") || key.starts_with("CUDA_"));
    if (plain || device) env[std::string(key)] = std::string(entry.substr(equals + 1));
  }
  return env;
}

std::string api_url(const Config& config) {
  std::string host = config.text("api.bind");
  if (host == "0.0.0.0") host = "127.0.0.1";
  if (host == "::") host = "::1";
  if (host.find(':') != std::string::npos) host = "[" + host + "]";
  return cat("http://", host, ":", config.integer("api.port"));
}

}  // namespace glm53::agent
