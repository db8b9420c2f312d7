// What the configuration means to an agent, and the documents it makes for its children.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/reconcile/reconcile.h"
#include "agent/trust/trust.h"
#include "common/config.h"
#include "common/http_client.h"
#include "common/rank_contract.h"

namespace glm53::agent {

/// The node's own part of the configuration, checked.
struct AgentSettings {
  std::string role, name;  ///< "head" or "worker"; name for people
  std::string address;     ///< of ranks on this node, as the head's file says
  std::string state_dir, run_dir, logs_dir;
  std::string hub_cache;  ///< of models that are named by repository
  std::string admin_socket;
  std::optional<HostPort> admin_listen;
  bool admin_tls = false;   ///< of admin_listen
  std::string admin_token;  ///< secret; for connections without TLS
  std::string trust_dir;    ///< certificates and members
  /// Set by a running agent.
  std::shared_ptr<trust::Trust> trust;
  uint64_t log_max_bytes = 64u << 20;
  int keep_generations = 5;
  std::string engine_path;   ///< engine.path, absolute; "" = of the active bundle, or beside the agent's program
  std::string engine_store;  ///< where installed bundles lie
  std::string rank_path;     ///< engine.rank_path, absolute; "" = the engine
  /// The engine's program now: installing another bundle changes what the next start runs. Throws Error(corrupt) E656.
  std::string engine() const;
  std::string rank_program() const { return rank_path.empty() ? engine() : rank_path; }
  int threads = 0;
  std::string log_level;
};
/// Throws Error(config): a TCP address that is not loopback without TLS, a missing token file, too long paths, an
/// unreadable token.
AgentSettings agent_settings(const Config& config);

bool is_loopback(const std::string& host);

/// The configuration of a cluster as ranks get it: the file, the operator's settings, relative paths made absolute.
struct Effective {
  Config config;
  std::string json;  ///< flat object of the cluster keys
  std::string hash;
};
Effective make_effective(Config file, const std::map<std::string, std::string>& settings);
/// From what make_effective wrote.
Effective restore_effective(const std::string& json);

reconcile::Limits limits_of(const Config& config);

/// How to reach the worker's agent.
struct WorkerAddress {
  std::string endpoint, token;  ///< token is secret; empty with TLS
  std::shared_ptr<const trust::Trust> trust;
  /// A client of the worker's admin API. Throws Error(unavailable) E720 while this node has no certificate.
  HttpClient connect() const;
};
/// nullopt in a cluster of one node.
std::optional<WorkerAddress> worker_address(const Config& file, const AgentSettings& own);

/// The head's part of a rank's configuration.
RankConfig rank_config(const Effective& effective, int rank, uint64_t generation);
/// The part that only the rank's own node knows: sockets and threads.
RankConfig localize(RankConfig config, const AgentSettings& settings);
ApiConfig api_config(const Effective& effective, const AgentSettings& settings);

/// PATH, HOME, TMPDIR, and NCCL_*/CUDA_* unless the ranks run on the CPU; nothing else of the agent's own environment.
std::map<std::string, std::string> child_environment(bool gpu);

/// "http://127.0.0.1:8888", for people.
std::string api_url(const Config& config);

}  // namespace glm53::agent
