// MLPs (spec model §6): the dense SwiGLU, and the mixture of routed experts with one shared expert.
#pragma once

#include <vector>

#include "engine/model/weights.h"
#include "engine/model/workspace.h"

namespace glm53 {

/// down(silu(min(gate x, limit)) · clamp(up x, ±limit)) on this rank's slice of the width.
class SwigluMlp {
 public:
  SwigluMlp(const WeightReader& weights, WeightGroup group, float limit);
  /// y = beta · y + this rank's partial sum. x, y act [R][H].
  void run(const Step& step, const Tensor& x, const Tensor& y, float beta = 0) const;

 private:
  Weight gate_, up_, down_;
  float limit_;
};

class MoeMlp {
 public:
  /// `weights` sees the layer's "mlp.".
  MoeMlp(const WeightReader& weights, const ModelConfig& config, int layer);
  /// y = this rank's partial sum of routed and shared experts. x, y act [R][H].
  void run(const Step& step, const Tensor& x, const Tensor& y) const;

 private:
  Weight router_, bias_;
  SwigluMlp shared_;
  std::vector<Weight> gate_, up_, down_;  ///< by expert
  int layer_, groups_, top_groups_, k_;
  bool normalize_;
  float scale_, limit_;
};

}  // namespace glm53
