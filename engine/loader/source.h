// The WeightSource over an open checkpoint; open_checkpoint() opens the folder first.
#pragma once

#include <memory>

#include "engine/loader/safetensors.h"
#include "kernels/ops.h"
#include "kernels/weight.h"

namespace glm53 {

/// Throws Error(unavailable) naming the group whose format is not as stored. `ops` outlives the source.
std::unique_ptr<WeightSource> make_checkpoint_source(std::shared_ptr<const Checkpoint> checkpoint,
                                                     const FormatPolicy& policy, Shard shard, Ops& ops);
/// Name of a group in errors and in the memory ledger ("kda_in").
std::string_view name(WeightGroup group);

}  // namespace glm53
