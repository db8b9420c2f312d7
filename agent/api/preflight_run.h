// The checks of agent/preflight on the nodes of this cluster.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "agent/api/report.h"
#include "agent/api/settings.h"
#include "agent/preflight/check.h"

namespace glm53::agent {

/// The checks of this node. `own`: its file; `cluster`: the effective keys of the head; `report`: its processes, which
/// may hold what others may not.
preflight::NodeResult check_own_node(const AgentSettings& settings, const Config& own, const Effective& cluster,
                                     const NodeReport& report, bool deep);
/// Head and worker at the same time; a worker that does not answer is a failed check of its own.
std::vector<preflight::NodeResult> check_cluster(const AgentSettings& settings, const Config& own,
                                                 const Effective& cluster, const NodeReport& report,
                                                 const std::optional<WorkerAddress>& worker, bool deep);

/// The checks of the node that a file describes, without an agent: `glm53-agent preflight`.
preflight::NodeResult check_file(const std::string& path, bool deep);

/// What the head's agent asks a worker's: POST /node/preflight.
struct PreflightRequest {
  std::string config_json;  ///< flat object of the effective cluster keys
  bool deep = false;
};
std::string to_json(const PreflightRequest& request);
/// Throws Error(usage) naming the member.
PreflightRequest parse_preflight_request(std::string_view json);

}  // namespace glm53::agent
