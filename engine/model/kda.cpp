#include "engine/model/kda.h"

namespace glm53 {

KdaLayer::KdaLayer(const WeightReader& weights, const ModelConfig& config, const ShardPlan& shard, int layer,
                   int cache_layer)
    : layer_(layer),
      cache_layer_(cache_layer),
      dim_(config.kda_dim),
      width_(int64_t{shard.kda_heads} * config.kda_dim),
      eps_(config.rms_eps),
      lower_bound_(config.gate_lower_bound) {
  using enum WeightGroup;
  constexpr Split rows = Split::rows;
  qkv_ = weights.stacked({{"q_proj.weight", rows}, {"k_proj.weight", rows}, {"v_proj.weight", rows}}, kda_in);
  conv_ = weights.stacked({{"q_conv1d.weight", rows}, {"k_conv1d.weight", rows}, {"v_conv1d.weight", rows}}, exact);
  bottleneck_ = weights.stacked({{"f_a_proj.weight", Split::none}, {"g_a_proj.weight", Split::none}}, kda_in);
  f_b_ = weights.take("f_b_proj.weight", kda_in, rows);
  g_b_ = weights.take("g_b_proj.weight", kda_in, rows);
  beta_ = weights.take("b_proj.weight", exact, rows);
  a_log_ = weights.take("A_log", exact, rows);
  dt_bias_ = weights.take("dt_bias", exact, rows);
  o_norm_ = weights.take("o_norm.weight", exact);
  o_proj_ = weights.take("o_proj.weight", kda_out, Split::columns);
}

void KdaLayer::run(const Step& step, const Tensor& x, const Tensor& y) const {
  const KdaSpace& s = step.space.kda;
  const Tensor raw = step.rows(s.raw), qkv = step.rows(s.qkv), bottleneck = step.rows(s.bottleneck);
  const Tensor gate = step.rows(s.gate), out_gate = step.rows(s.out_gate), beta = step.rows(s.beta),
               core = step.rows(s.core);
  step.linear(x, qkv_, raw);
  step.ops.kda_conv({&step.batch, cache_layer_, &step.caches, raw, &conv_, qkv});
  step.linear(x, bottleneck_, bottleneck);
  step.linear(bottleneck.columns(0, dim_), f_b_, gate);
  step.linear(bottleneck.columns(dim_, 2 * dim_), g_b_, out_gate);
  step.linear(x, beta_, beta);

  KdaArgs args{};
  args.batch = &step.batch;
  args.layer = cache_layer_;
  args.caches = &step.caches;
  args.q = qkv.columns(0, width_);
  args.k = qkv.columns(width_, 2 * width_);
  args.v = qkv.columns(2 * width_, 3 * width_);
  args.gate = gate;
  args.beta = beta;
  args.a_log = &a_log_;
  args.dt_bias = &dt_bias_;
  args.lower_bound = lower_bound_;
  args.out = core;
  if (step.batch.window_rows > 0) step.ops.kda_window(args);
  if (step.chunk_rows() > 0) step.ops.kda_chunk(args);
  step.show("kda", layer_, "q", args.q);
  step.show("kda", layer_, "k", args.k);
  step.show("kda", layer_, "v", args.v);
  step.show("kda", layer_, "gate", gate);
  step.show("kda", layer_, "beta", beta);
  step.show("kda", layer_, "core", core);

  step.ops.gated_norm({core, out_gate, &o_norm_, eps_, dim_, core});
  step.linear(core, o_proj_, y);
}

}  // namespace glm53
