// The WeightSource over an open checkpoint; open_checkpoint() opens the folder first.
#pragma once

#include <memory>
#include <vector>

#include "engine/loader/block_reader.h"
#include "engine/loader/formats.h"
#include "engine/loader/safetensors.h"
#include "engine/loader/take.h"
#include "kernels/ops.h"
#include "kernels/weight.h"

namespace glm53 {

struct SourceOptions {
  /// Refuse a weight with a value that is not finite, naming layer and tensor.
  bool check_values = false;
  /// What will be taken, in this order: bytes are then read ahead by several threads. Another order works too, from
  /// where it differs without reading ahead; so does an empty list.
  std::vector<Take> takes{};
  /// False: a weight is valid only until the next one is taken, for those who pass weights on.
  bool keep = true;
  ReadOptions read{};
};

/// Throws Error(unavailable) naming the group whose format is not as stored. `ops` outlives the source.
std::unique_ptr<WeightSource> make_checkpoint_source(std::shared_ptr<const Checkpoint> checkpoint,
                                                     const FormatPolicy& policy, Shard shard, Ops& ops,
                                                     SourceOptions options = {});

}  // namespace glm53
