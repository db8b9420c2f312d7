// Models that a cluster takes from a Hub: named by repository and commit, kept in each node's own cache.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "common/config.h"

namespace glm53::agent {

struct HubModel {
  std::string key;           ///< "model" or "draft": the prefix of its configuration keys
  std::string repo, commit;  ///< "org/name", 40 hex digits
  bool operator==(const HubModel&) const = default;
};

/// What the cluster's keys name by repository and not by path. Throws Error(config) where the revision is no commit:
/// branches move, and two nodes may see two different ones.
std::vector<HubModel> hub_models(const Config& cluster);

/// Folder of a model in the hub cache of this node.
std::string snapshot_folder(const std::string& cache, const HubModel& model);

/// The cluster's keys with model.path and draft.path as they are on the node that has this cache.
Config with_local_models(const Config& cluster, const std::string& cache);
/// The same for a flat object of keys.
nlohmann::ordered_json with_local_models(nlohmann::ordered_json flat, const std::string& cache);

/// {"models":[{"key","repo","commit"}]}, as a command to a node carries them.
std::string to_json(const std::vector<HubModel>& models);
/// Throws Error(usage) for names that could leave the cache.
std::vector<HubModel> parse_hub_models(std::string_view json);

}  // namespace glm53::agent
