// Tensors of a DFlash2 drafter (spec speculative §1.3).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/draft/dflash.h"
#include "engine/loader/safetensors.h"
#include "engine/model/weights.h"

namespace glm53 {

/// Coefficients of the convolution around a sublayer: constant part and what the input adds.
struct DflashConv {
  Weight base, projection;
};
struct DflashLayer {
  Weight input_norm, post_norm;
  Weight q, k, v, o, q_norm, k_norm;
  Weight gate, up, down;
  DflashConv attention_conv, mlp_conv;
};
struct DflashWeights {
  Weight fc, hidden_norm, norm;
  Weight selector_hidden, predecessor, successor;
  std::vector<DflashLayer> layers;
};

/// What of the drafter is on each rank.
struct DflashShard {
  int heads = 0, kv_heads = 0;
  int64_t intermediate = 0;
};
/// Throws Error(config) naming what the number of ranks does not divide.
DflashShard plan_dflash_shard(const DflashConfig& config, Shard shard);

/// Stored name of every tensor by its name in the published drafters; other exports write some of them differently.
/// Throws Error(weights) with all findings, a line each: missing, wrong shape or dtype, or of no known purpose.
std::map<std::string, std::string> check_dflash_inventory(const Checkpoint& checkpoint, const DflashConfig& config);

/// Takes them all. `source` cuts for this rank.
DflashWeights load_dflash_weights(const std::map<std::string, std::string>& names, const DflashConfig& config,
                                  WeightSource& source, WeightLedger& ledger);

}  // namespace glm53
