#include "engine/model/mlp.h"

namespace glm53 {

SwigluMlp::SwigluMlp(const WeightReader& weights, WeightGroup group, float limit)
    : gate_(weights.take("gate_proj.weight", group, Split::rows)),
      up_(weights.take("up_proj.weight", group, Split::rows)),
      down_(weights.take("down_proj.weight", group, Split::columns)),
      limit_(limit) {}

void SwigluMlp::run(const Step& step, const Tensor& x, const Tensor& y, float beta) const {
  // The workspace is as wide as the widest MLP; a narrower one uses its beginning as a contiguous tensor.
  const auto narrowed = [&](const Tensor& t) {
    return Tensor::of(t.data, t.dtype, {step.capacity, gate_.out}, t.place);
  };
  const Tensor gate = narrowed(step.space.mlp.gate), up = narrowed(step.space.mlp.up);
  step.linear(x, gate_, gate);
  step.linear(x, up_, up);
  step.ops.swiglu({gate, up, limit_, gate});
  step.linear(gate, down_, y, beta);
}

MoeMlp::MoeMlp(const WeightReader& weights, const ModelConfig& config, int layer)
    : router_(weights.take("gate.weight", WeightGroup::exact)),
      bias_(weights.take("gate.e_score_correction_bias", WeightGroup::exact)),
      shared_(weights.under("shared_experts."), WeightGroup::shared_expert, config.swiglu_limit),
      layer_(layer),
      groups_(config.groups),
      top_groups_(config.top_groups),
      k_(config.experts_per_token),
      normalize_(config.norm_topk),
      scale_(config.routed_scale),
      limit_(config.swiglu_limit) {
  for (int e = 0; e < config.experts; ++e) {
    const WeightReader expert = weights.under(cat("experts.", e, "."));
    gate_.push_back(expert.take("gate_proj", WeightGroup::routed_expert, Split::rows));
    up_.push_back(expert.take("up_proj", WeightGroup::routed_expert, Split::rows));
    down_.push_back(expert.take("down_proj", WeightGroup::routed_expert, Split::columns));
  }
}

void MoeMlp::run(const Step& step, const Tensor& x, const Tensor& y) const {
  const Tensor index = step.rows(step.space.mlp.index), weight = step.rows(step.space.mlp.weight);
  RouterArgs router{};
  router.x = x;
  router.w = &router_;
  router.bias = &bias_;
  router.groups = groups_;
  router.top_groups = top_groups_;
  router.k = k_;
  router.normalize = normalize_;
  router.scale = scale_;
  router.real_rows = step.batch.rows;
  router.index = index;
  router.weight = weight;
  if (step.probe) router.logits = step.rows(step.probe_space.router_logits);
  step.ops.router(router);
  step.show("router", layer_, "logits", router.logits);
  step.show("router", layer_, "index", index);
  step.show("router", layer_, "weight", weight);
  step.ops.moe({x, index, weight, gate_, up_, down_, limit_, y, step.batch.window_rows});
  step.show("moe", layer_, "routed", y);
  shared_.run(step, x, y, 1);
}

}  // namespace glm53
