// `glm53-engine api`: the API process.
#pragma once

namespace glm53 {

/// Runs the API process with the JSON configuration read from `config_fd` (docs/rank-contract.md); returns the exit
/// code.
int run_api(int config_fd);

}  // namespace glm53
