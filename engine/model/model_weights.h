// All weights of the backbone, as the forward pass holds them.
#pragma once

#include <string_view>
#include <variant>
#include <vector>

#include "engine/loader/config.h"
#include "engine/model/kda.h"
#include "engine/model/load.h"
#include "engine/model/mla.h"
#include "engine/model/mlp.h"
#include "engine/model/weights.h"

namespace glm53 {

/// Weights of one mHC site and the norm that follows it.
struct Site {
  Weight fn, base, scale, norm;
  Site(const WeightReader& layer, std::string_view site, std::string_view norm_name);
};

struct Layer {
  Site attention_site, mlp_site;
  std::variant<KdaLayer, MlaLayer> attention;
  std::variant<SwigluMlp, MoeMlp> mlp;
  Layer(const WeightReader& layer, const ModelConfig& config, const ShardPlan& shard, int number);
};

/// Weights outside the layers.
struct OuterWeights {
  Weight embed, norm, head;
  OuterWeights(WeightSource& source, WeightLedger& ledger);
};

struct ModelWeights {
  OuterWeights outer;
  std::vector<Layer> layers;
  ModelWeights(const ModelConfig& config, const ShardPlan& shard, WeightSource& source, WeightLedger& ledger,
               const PartLoaded& loaded);
};

/// "model.language_model.layers.3."
std::string layer_prefix(int number);

}  // namespace glm53
