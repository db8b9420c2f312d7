// A KDA layer's attention (spec model §4) on this rank's heads.
#pragma once

#include "engine/model/weights.h"
#include "engine/model/workspace.h"

namespace glm53 {

class KdaLayer {
 public:
  /// `weights` sees the layer's "self_attn."; `layer` is its number in the model, `cache_layer` among the KDA layers.
  KdaLayer(const WeightReader& weights, const ModelConfig& config, const ShardPlan& shard, int layer, int cache_layer);
  /// y = this rank's partial sum of the attention output. x normed input, act [R][H]; y act [R][H].
  void run(const Step& step, const Tensor& x, const Tensor& y) const;
  const Weight* a_log() const { return &a_log_; }
  const Weight* dt_bias() const { return &dt_bias_; }

 private:
  Weight qkv_, conv_, bottleneck_, f_b_, g_b_, beta_, a_log_, dt_bias_, o_norm_, o_proj_;
  int layer_, cache_layer_, dim_;
  int64_t width_;  ///< channels of q, k or v on this rank
  float eps_, lower_bound_;
};

}  // namespace glm53
