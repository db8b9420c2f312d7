// The checks of a node before a start, all of them every time: one run names every failure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "agent/preflight/check.h"
#include "agent/preflight/facts.h"
#include "agent/preflight/host.h"
#include "common/config.h"

namespace glm53::preflight {

/// What a node is to do, taken from the configuration.
struct Subject {
  std::string node;  ///< "head" or "worker"
  std::string backend;
  std::vector<int> devices;  ///< of the ranks on this node
  int ranks = 1, nodes = 1;  ///< in the cluster
  bool shares_host = false;  ///< the nodes are two agents of one machine (loopback addresses)
  std::string fabric_address;
  std::string state_dir, run_dir, logs_dir;
  std::string engine;  ///< program of ranks and API process
  std::string
      stand_in;  ///< engine.rank_path: a program that is not the engine, with its own idea of weights; may be empty
  std::string model, draft;                ///< folders; draft may be empty
  std::string model_source, draft_source;  ///< "org/name@commit" when a start downloads what is missing
  std::string api_bind;
  uint16_t api_port = 0, ranks_port = 0;
  int64_t kv_bytes = 0, reserve = 0;
  std::string hash;  ///< of the cluster keys
};
/// `own` has this node's keys, `cluster` the head's effective ones with absolute paths. `engine`: where the program is
/// when engine.path does not say.
Subject subject_of(const Config& own, const Config& cluster, const std::string& node, const std::string& engine);

/// What the checks look at. `gpus` and `own_pids` are asked for once.
struct Context {
  const Subject& subject;
  const FileRoot& files;
  const Host& host;
  GpuFacts gpus;
  std::vector<InterfaceAddress> addresses;
  std::vector<int64_t> own_pids;  ///< processes of this cluster: they may hold its ports, memory and GPUs
  std::optional<int> pinned_gid;  ///< NCCL_IB_GID_INDEX
  bool deep = false;

  bool wants_gpu() const;     ///< GPU checks apply
  bool wants_fabric() const;  ///< two machines meet over RDMA
  bool is_own(int64_t pid) const;
};

struct Options {
  std::vector<int64_t> own_pids;
  bool deep = false;
};
/// Never throws for what it finds; a check that cannot be done is a failed one.
NodeResult run_checks(const Subject& subject, const FileRoot& files, const Host& host, const Options& options);

/// Adds what only both results together tell: clocks (corrected by half the round trip) and MTUs.
void compare_nodes(NodeResult& head, NodeResult& worker, int64_t head_clock, int64_t round_trip_ms);
/// The result of a node whose agent did not answer.
NodeResult unreachable(const std::string& node, const std::string& why);

}  // namespace glm53::preflight
