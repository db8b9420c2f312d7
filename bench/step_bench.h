// A rank of a configuration with generated weights, timed step by step: what bench_step and bench_layer share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/model/load.h"
#include "kernels/ops.h"

namespace glm53 {

struct StepOptions {
  std::string model = "models/glm53-tiny", json, compare, dense = "bf16", head, kv = "auto";
  std::vector<int> rows = {1, 4, 8, 16, 32};
  int context = 1024, tp = 2, reps = 11, expert_bits = 4;
  bool graph = true, layers = false;  ///< layers: each one by itself
};
/// Throws Error(usage) naming the option.
StepOptions parse_step_options(int argc, char** argv, const char* program);

/// What was measured of one shape.
struct StepResult {
  std::string name;  ///< "step", or "layer 3 (mla, moe)"
  int rows = 0;
  double us = 0;
  double bytes = 0;      ///< read once: weights, state, index keys
  double experts = 0;    ///< distinct ones a sparse layer, mean
  double projected = 0;  ///< µs on a GB10, from a GPU's figures; no measurement
};

struct StepReport {
  std::string backend, activation;
  double copy_gbs = 0;  ///< read and written
  std::vector<StepResult> results;
};

/// Measures and prints a table, writes options.json, compares with options.compare.
int run_step_bench(const StepOptions& options);

}  // namespace glm53
