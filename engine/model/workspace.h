// Memory of one step, planned once at load; and what the layers of a step share.
#pragma once

#include <string>
#include <string_view>

#include "common/strings.h"
#include "engine/loader/config.h"
#include "engine/model/model.h"
#include "kernels/ops.h"

namespace glm53 {

/// Intermediates of a KDA layer, act [max_rows][·].
struct KdaSpace {
  Tensor raw, qkv;    ///< q|k|v before and after the convolution
  Tensor bottleneck;  ///< f_a|g_a
  Tensor gate, out_gate, beta, core;
};
/// Intermediates of an MLA layer, act [max_rows][·] but for head_weight (f32).
struct MlaSpace {
  Tensor q_rank, latent, key, key_gate, query, head_weight, q, q_latent, attended, expanded;
};
/// Intermediates of an MLP: gate and up of the dense or shared expert; the router's choice.
struct MlpSpace {
  Tensor gate, up;       ///< act [max_rows][widest MLP of this rank]
  Tensor index, weight;  ///< i32, f32 [max_rows][k]
};

/// Everything a forward pass writes besides the caches. Attention and MLP never live at the same time and share memory.
struct WorkspaceTensors {
  Tensor streams;               ///< act [R][n][H]
  Tensor post, comb;            ///< f32 [R][n], [R][n][n]
  Tensor u, y;                  ///< act [R][H]: input and output of the current site
  Tensor mean, hidden;          ///< act [R][H] before and after the final norm
  Tensor taps;                  ///< act [R][taps·H]; empty when nobody asked for taps
  Tensor selected, n_selected;  ///< i32 [R][top pools], [R]: outlive their layer for shared indexers
  Tensor picked;                ///< act [L][H]: rows of `hidden` whose logits are wanted
  Tensor logits_part, logits;   ///< f32 [L][vocab of this rank], [L][vocab] (rank 0)
  KdaSpace kda;
  MlaSpace mla;
  MlpSpace mlp;
};
/// The tensors, and the memory of those that are its own.
struct Workspace : WorkspaceTensors {
  Arena arena;
};
Workspace plan_workspace(const ModelConfig& config, const ShardPlan& shard, const ModelLimits& limits, Ops& ops);
/// A second one for rows that stop between two layers while others pass: what goes from layer to layer (streams, post,
/// comb, u, selected, taps) is its own, everything else is `shared`'s.
Workspace plan_held(const WorkspaceTensors& shared, const ModelConfig& config, const ShardPlan& shard,
                    const ModelLimits& limits, Ops& ops);

/// Extra outputs that only golden tests ask for.
struct ProbeSpace {
  Buffer memory;
  Tensor scores;         ///< f32 [R][max pools] of the indexer
  Tensor router_logits;  ///< f32 [R][experts]
};
ProbeSpace plan_probe_space(const ModelConfig& config, const ModelLimits& limits, Ops& ops);

/// One step on its way through the layers.
struct Step {
  Ops& ops;
  const Batch& batch;
  const Caches& caches;
  const Workspace& space;
  const Probe& probe;
  const ProbeSpace& probe_space;
  int64_t capacity = 0;  ///< rows of the batch with padding

  /// The rows of this step.
  Tensor rows(const Tensor& t) const { return t.rows(0, capacity); }
  int chunk_rows() const { return static_cast<int>(capacity) - batch.window_rows; }
  void linear(const Tensor& x, const Weight& w, const Tensor& y, float beta = 0) const {
    ops.linear({.x = x, .w = &w, .y = y, .beta = beta, .window_rows = batch.window_rows});
  }
  /// Reports a value as "<what><layer>.<name>".
  void show(std::string_view what, int layer, std::string_view name, const Tensor& value) const {
    if (!probe) return;
    ops.synchronize();
    probe(cat(what, layer, ".", name), value);
  }
};

}  // namespace glm53
