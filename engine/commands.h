// The sub-commands for people. Each prints to standard output and returns an exit code, or throws Error.
#pragma once

#include <string>
#include <vector>

namespace glm53 {

/// Validates configuration, headers and inventory of a checkpoint, a line for each problem; with `values` also reads
/// every tensor and names those with values that are not finite.
int check_checkpoint(const std::string& dir, bool values);

/// Version, backends and formats as JSON.
int describe();

struct PrepareOptions {
  std::string model, out, dense = "stored", head = "stored";
  std::vector<std::string> formats;  ///< GROUP=FORMAT, after `dense` and `head`
  int ranks = 1, rank = -1;          ///< rank −1: all of them
  bool check_weights = false;
};
/// Writes prepared weights (docs/weights.md).
int prepare(const PrepareOptions& options);

}  // namespace glm53
