// An MLA layer's attention with its pooled indexer (spec model §5) on this rank's heads. Latents and indexer are
// replicated.
#pragma once

#include "engine/model/weights.h"
#include "engine/model/workspace.h"

namespace glm53 {

class MlaLayer {
 public:
  /// `weights` sees the layer's "self_attn."; `layer` is its number in the model, `cache_layer` among the MLA layers. A
  /// `shared` layer has no indexer and attends to what the layer before it selected.
  MlaLayer(const WeightReader& weights, const ModelConfig& config, const ShardPlan& shard, int layer, int cache_layer,
           bool shared);
  /// y = this rank's partial sum of the attention output. x normed input, act [R][H]; y act [R][H].
  void run(const Step& step, const Tensor& x, const Tensor& y) const;
  /// Only what later rows see of these: latents, indexer keys and completed pools. run() begins with it.
  void write(const Step& step, const Tensor& x) const;

 private:
  /// Selects for every row, its own pool included; leaves the selection in the workspace.
  void select(const Step& step, const Tensor& x, const Tensor& q_rank) const;

  Weight q_a_, q_norm_, q_b_, kv_a_, kv_norm_, kv_b_, o_proj_;
  Weight wq_b_, wk_, k_norm_, k_bias_, head_weight_, pool_gate_, pool_ape_;  ///< empty when shared
  int layer_, cache_layer_, heads_, nope_, v_, index_heads_, top_pools_;
  bool shared_;
  float eps_, scale_;
};

}  // namespace glm53
