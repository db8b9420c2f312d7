// Weights that are nobody's: of a configuration's shapes and formats, made up, for measurements.
#pragma once

#include <memory>

#include "engine/loader/config.h"
#include "kernels/ops.h"
#include "kernels/weight.h"

namespace glm53 {

struct GeneratedOptions {
  int expert_bits = 4;  ///< of EXL3 routed experts; 0: bf16
  bool keep = true;     ///< false: a weight is valid only until the next one is taken
};

/// Weights of a rank, small enough that activations stay finite. The same on every run and machine; values repeat with
/// a period of some MiB, no weight shares memory with another. `ops` outlives the source.
std::unique_ptr<WeightSource> make_generated_source(const ModelConfig& config, const FormatPolicy& policy, Shard shard,
                                                    Ops& ops, GeneratedOptions options = {});

}  // namespace glm53
