#include "engine/model/mla.h"

namespace glm53 {

MlaLayer::MlaLayer(const WeightReader& weights, const ModelConfig& config, const ShardPlan& shard, int layer,
                   int cache_layer, bool shared)
    : layer_(layer),
      cache_layer_(cache_layer),
      heads_(shard.heads),
      nope_(config.nope),
      v_(config.v_dim),
      index_heads_(config.index_heads),
      top_pools_(config.top_pools()),
      shared_(shared),
      eps_(config.rms_eps),
      scale_(config.attention_scale()) {
  using enum WeightGroup;
  q_a_ = weights.take("q_a_proj.weight", mla);
  q_norm_ = weights.take("q_a_layernorm.weight", exact);
  q_b_ = weights.take("q_b_proj.weight", mla, Split::rows);
  kv_a_ = weights.take("kv_a_proj_with_mqa.weight", mla);
  kv_norm_ = weights.take("kv_a_layernorm.weight", exact);
  kv_b_ = weights.take("kv_b_proj.weight", exact, Split::rows);  // absorb and expand take it as stored
  o_proj_ = weights.take("o_proj.weight", mla, Split::columns);
  if (shared) return;
  const WeightReader own = weights.under("indexer.");
  wq_b_ = own.take("wq_b.weight", indexer);
  wk_ = own.take("wk.weight", indexer);
  k_norm_ = own.take("k_norm.weight", exact);
  k_bias_ = own.take("k_norm.bias", exact);
  head_weight_ = own.take("weights_proj.weight", exact);
  pool_gate_ = own.take("index_kpool_compress_gate", indexer);
  pool_ape_ = own.take("index_kpool_compress_ape", exact);
}

void MlaLayer::write(const Step& step, const Tensor& x) const {
  const MlaSpace& s = step.space.mla;
  const Tensor latent = step.rows(s.latent);
  step.linear(x, kv_a_, latent);
  step.ops.rms_norm({latent, &kv_norm_, eps_, latent});
  step.ops.latent_write({&step.batch, cache_layer_, &step.caches, latent});
  if (shared_) return;
  const Tensor key = step.rows(s.key), key_gate = step.rows(s.key_gate);
  step.linear(x, wk_, key);
  step.linear(x, pool_gate_, key_gate);
  step.ops.index_write({&step.batch, cache_layer_, &step.caches, key, key_gate, &k_norm_, &k_bias_, &pool_ape_});
}

void MlaLayer::select(const Step& step, const Tensor& x, const Tensor& q_rank) const {
  const MlaSpace& s = step.space.mla;
  const Tensor query = step.rows(s.query), head_weight = step.rows(s.head_weight);
  step.linear(q_rank, wq_b_, query);
  step.linear(x, head_weight_, head_weight);
  IndexSelectArgs args{};
  args.batch = &step.batch;
  args.layer = cache_layer_;
  args.caches = &step.caches;
  args.query = query;
  args.head_weight = head_weight;
  args.heads = index_heads_;
  args.top_pools = top_pools_;
  args.selected = step.rows(step.space.selected);
  args.n_selected = step.rows(step.space.n_selected);
  if (step.probe) args.scores = step.rows(step.probe_space.scores);
  step.ops.index_select(args);
  step.show("mla", layer_, "scores", args.scores);
}

void MlaLayer::run(const Step& step, const Tensor& x, const Tensor& y) const {
  const MlaSpace& s = step.space.mla;
  const Tensor q_rank = step.rows(s.q_rank), latent = step.rows(s.latent), q = step.rows(s.q);
  const Tensor q_latent = step.rows(s.q_latent), attended = step.rows(s.attended), expanded = step.rows(s.expanded);
  const Tensor selected = step.rows(step.space.selected), n_selected = step.rows(step.space.n_selected);
  write(step, x);  // before selecting: a row's own pool may be complete and must compete
  step.linear(x, q_a_, q_rank);
  step.ops.rms_norm({q_rank, &q_norm_, eps_, q_rank});
  if (!shared_) select(step, x, q_rank);
  step.linear(q_rank, q_b_, q);
  step.show("mla", layer_, "q_rank", q_rank);
  step.show("mla", layer_, "latent", latent);
  step.show("mla", layer_, "q", q);
  step.show("mla", layer_, "selected", selected);
  step.show("mla", layer_, "n_selected", n_selected);

  const int window = step.batch.window_rows;
  step.ops.mla_absorb({q, &kv_b_, heads_, nope_, v_, q_latent, window});
  step.ops.mla_sparse(
      {&step.batch, cache_layer_, &step.caches, q_latent, selected, n_selected, heads_, scale_, attended});
  step.ops.mla_expand({attended, &kv_b_, heads_, nope_, v_, expanded, window});
  step.linear(expanded, o_proj_, y);
}

}  // namespace glm53
