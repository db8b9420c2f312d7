// The status document.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "agent/api/config_file.h"
#include "agent/api/driver.h"
#include "agent/api/journal.h"
#include "agent/trust/trust.h"

namespace glm53::agent {

struct Warning {
  std::string name, severity, text, remedy;
};
/// Unhealthy conditions that are there now, worst first.
std::vector<Warning> warnings_of(const DriverView& view, const ConfigFile::Drift& drift,
                                 const std::string& database_moved_to);

/// Of the cluster's certificates: none though one is `needed`, some that expire within 30 days. `now` in seconds.
std::vector<Warning> trust_warnings(const trust::Trust& trust, bool needed, int64_t now);

nlohmann::ordered_json head_status(const DriverView& view, const ConfigFile::Drift& drift,
                                   const std::vector<Warning>& warnings, const std::vector<state::EventRow>& events);
nlohmann::ordered_json worker_status(const NodeReport& node, const std::vector<state::EventRow>& events);

}  // namespace glm53::agent
