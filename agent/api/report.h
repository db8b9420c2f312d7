// What a node says about itself: GET /node, and the head's own view of itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "agent/api/model_job.h"
#include "agent/api/settings.h"
#include "agent/reconcile/reconcile.h"
#include "agent/supervise/supervisor.h"

namespace glm53::agent {

/// Times are ages, so that the clocks of two machines need not agree.
struct ProcessReport {
  std::string name;
  uint64_t generation = 0;
  int64_t pid = 0;
  bool ready = false, stop_requested = false, ended = false;
  std::optional<int> exit_code;
  int exit_signal = 0;
  Phase phase = Phase::exec;
  std::optional<std::pair<uint64_t, uint64_t>> progress;
  int64_t silent_ms = 0, extended_ms = 0, started_ms_ago = 0, ended_ms_ago = 0;
  std::string last_error, config_hash;
  uint64_t memory_bytes = 0;
  int64_t restarts = 0;  ///< starts after the first one, within 30 days
};
struct NodeReport {
  std::string name, role, address, version;
  int64_t pid = 0, uptime_s = 0;
  uint64_t agent_memory = 0, memory_total = 0, memory_available = 0;
  uint64_t epoch = 0;  ///< newest one seen (a worker)
  std::vector<ProcessReport> processes;
  FetchReport fetch;
};

nlohmann::ordered_json to_json(const NodeReport& report);
/// Members that are missing or of a wrong type get their defaults: a newer or older agent is on the other end.
NodeReport parse_report(std::string_view json);

/// The code that an agent named; internal for any other text.
Code parse_code(std::string_view text);
/// Rank number of "rank3"; -1 for anything else.
int rank_of(std::string_view process_name);
/// `request`: of the models that are wanted now; what was fetched for another one does not count. Empty: none are
/// wanted, and what is still on its way is a leftover.
reconcile::ObservedNode to_observed(const NodeReport& report, reconcile::Time now, bool reachable,
                                    const std::string& request);
/// "org/name: 41 % of 164.2 GiB, 402.1 MiB/s", or the error.
std::string fetch_text(const FetchReport& fetch);

/// MemTotal and MemAvailable in bytes.
struct HostMemory {
  uint64_t total = 0, available = 0;
};
HostMemory host_memory();

}  // namespace glm53::agent
