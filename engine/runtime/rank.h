// `glm53-engine rank`: one rank from configuration to exit code.
#pragma once

namespace glm53 {

/// Runs a rank with the JSON configuration read from `config_fd` (docs/rank-contract.md); returns the exit code.
int run_rank(int config_fd);

}  // namespace glm53
