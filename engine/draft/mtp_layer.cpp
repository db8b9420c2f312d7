#include "engine/draft/mtp_layer.h"

namespace glm53 {
namespace {

ModelLimits space_limits(const Model& target, int rows) {
  ModelLimits l = target.limits();
  l.max_rows = rows;
  l.max_logit_rows = 1;  // the head has its own memory
  l.taps.clear();
  return l;
}

}  // namespace

MtpLayer::MtpLayer(const WeightReader& weights, Model& target, int rows, Ops& ops, Communicator& comm)
    : target_(target),
      ops_(ops),
      comm_(comm),
      eps_(target.config().rms_eps),
      enorm_(weights.take("enorm.weight", WeightGroup::exact)),
      hnorm_(weights.take("hnorm.weight", WeightGroup::exact)),
      eh_proj_(weights.take("eh_proj.weight", WeightGroup::drafter)),
      input_norm_(weights.take("input_layernorm.weight", WeightGroup::exact)),
      post_norm_(weights.take("post_attention_layernorm.weight", WeightGroup::exact)),
      head_norm_(weights.take("shared_head.norm.weight", WeightGroup::exact)),
      attention_(weights.under("self_attn."), target.config(), target.shared().shard, target.config().layers, 0, false),
      mlp_(weights.under("mlp."), target.config(), target.config().layers),
      space_(plan_workspace(target.config(), target.shared().shard, space_limits(target, rows), ops)) {
  const int64_t h = target.config().hidden;
  in_ = store_.take(ops.activation(), {rows, h});
  both_ = store_.take(ops.activation(), {rows, 2 * h});
  u_ = store_.take(ops.activation(), {rows, h});
}

void MtpLayer::enter(const Step& step) {
  const int64_t h = target_.config().hidden;
  const Tensor x = step.rows(space_.u), u = step.rows(u_), both = step.rows(both_);
  ops_.embed({&step.batch, target_.shared().embedding, x});
  ops_.rms_norm({x, &enorm_, eps_, both.columns(0, h)});
  ops_.rms_norm({step.rows(in_), &hnorm_, eps_, both.columns(h, 2 * h)});
  step.linear(both, eh_proj_, u);
  ops_.rms_norm({u, &input_norm_, eps_, x});
}

void MtpLayer::write(const Batch& batch, const Caches& caches) {
  const Step s = step(batch, caches);
  enter(s);
  attention_.write(s, s.rows(space_.u));
}

Tensor MtpLayer::run(const Batch& batch, const Caches& caches) {
  const Step s = step(batch, caches);
  enter(s);
  const Tensor x = s.rows(space_.u), y = s.rows(space_.y), u = s.rows(u_), z = s.rows(space_.hidden);
  attention_.run(s, x, y);
  comm_.all_reduce(y);
  ops_.add({u, y});
  ops_.rms_norm({u, &post_norm_, eps_, x});
  mlp_.run(s, x, y);
  comm_.all_reduce(y);
  ops_.add({u, y});
  ops_.rms_norm({u, &head_norm_, eps_, z});
  return z;
}

}  // namespace glm53
