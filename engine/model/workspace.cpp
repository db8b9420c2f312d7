#include "engine/model/workspace.h"

#include <algorithm>

#include "common/error.h"

namespace glm53 {
namespace {

constexpr size_t kAlign = 256;  // of Arena

/// Stands in for an Arena to find out how much one needs.
class Measure {
 public:
  Tensor take(Dtype dtype, std::initializer_list<int64_t> shape) {
    const Tensor t = Tensor::of(nullptr, dtype, shape);
    at_ = (at_ + kAlign - 1) / kAlign * kAlign + t.bytes();
    high_ = std::max(high_, at_);
    return t;
  }
  size_t mark() const { return at_; }
  void reset(size_t mark) { at_ = mark; }
  size_t high_water() const { return high_; }

 private:
  size_t at_ = 0, high_ = 0;
};

struct Sizes {
  const ModelConfig& c;
  const ShardPlan& shard;
  const ModelLimits& limits;
  Dtype act;
};

template <class Memory>
KdaSpace carve_kda(Memory& memory, const Sizes& s) {
  const int64_t rows = s.limits.max_rows, width = int64_t{s.shard.kda_heads} * s.c.kda_dim;
  KdaSpace k;
  k.raw = memory.take(s.act, {rows, 3 * width});
  k.qkv = memory.take(s.act, {rows, 3 * width});
  k.bottleneck = memory.take(s.act, {rows, int64_t{2} * s.c.kda_dim});
  k.gate = memory.take(s.act, {rows, width});
  k.out_gate = memory.take(s.act, {rows, width});
  k.beta = memory.take(s.act, {rows, s.shard.kda_heads});
  k.core = memory.take(s.act, {rows, width});
  return k;
}

template <class Memory>
MlaSpace carve_mla(Memory& memory, const Sizes& s) {
  const int64_t rows = s.limits.max_rows, heads = s.shard.heads, index_heads = s.c.index_heads;
  MlaSpace m;
  m.q_rank = memory.take(s.act, {rows, s.c.q_lora});
  m.latent = memory.take(s.act, {rows, s.c.kv_lora});
  m.key = memory.take(s.act, {rows, s.c.index_dim});
  m.key_gate = memory.take(s.act, {rows, s.c.index_dim});
  m.query = memory.take(s.act, {rows, index_heads * s.c.index_dim});
  m.head_weight = memory.take(Dtype::f32, {rows, index_heads});
  m.q = memory.take(s.act, {rows, heads * s.c.nope});
  m.q_latent = memory.take(s.act, {rows, heads * s.c.kv_lora});
  m.attended = memory.take(s.act, {rows, heads * s.c.kv_lora});
  m.expanded = memory.take(s.act, {rows, heads * s.c.v_dim});
  return m;
}

template <class Memory>
MlpSpace carve_mlp(Memory& memory, const Sizes& s) {
  const int64_t rows = s.limits.max_rows, width = std::max(s.shard.intermediate, s.shard.shared_intermediate);
  MlpSpace m;
  m.gate = memory.take(s.act, {rows, width});
  m.up = memory.take(s.act, {rows, width});
  m.index = memory.take(Dtype::i32, {rows, s.c.experts_per_token});
  m.weight = memory.take(Dtype::f32, {rows, s.c.experts_per_token});
  return m;
}

/// What goes from one layer to the next.
template <class Memory>
void carve_carried(Memory& memory, const Sizes& s, Workspace& w) {
  const int64_t rows = s.limits.max_rows, n = s.c.streams;
  w.streams = memory.take(s.act, {rows, n, s.c.hidden});
  w.post = memory.take(Dtype::f32, {rows, n});
  w.comb = memory.take(Dtype::f32, {rows, n, n});
  w.u = memory.take(s.act, {rows, s.c.hidden});
  w.selected = memory.take(Dtype::i32, {rows, s.c.top_pools()});
  w.n_selected = memory.take(Dtype::i32, {rows});
  const auto taps = static_cast<int64_t>(s.limits.taps.size());
  if (taps > 0) w.taps = memory.take(s.act, {rows, taps * s.c.hidden});
}

template <class Memory>
void carve(Memory& memory, const Sizes& s, Workspace& w) {
  const int64_t rows = s.limits.max_rows, hidden = s.c.hidden, picks = s.limits.max_logit_rows;
  carve_carried(memory, s, w);
  w.y = memory.take(s.act, {rows, hidden});
  w.mean = memory.take(s.act, {rows, hidden});
  w.hidden = memory.take(s.act, {rows, hidden});
  w.picked = memory.take(s.act, {picks, hidden});
  w.logits_part = memory.take(Dtype::f32, {picks, s.shard.vocab});
  w.logits = s.shard.size == 1 || s.shard.rank != 0 ? w.logits_part : memory.take(Dtype::f32, {picks, s.c.vocab});
  const size_t mark = memory.mark();
  w.kda = carve_kda(memory, s);
  memory.reset(mark);
  w.mla = carve_mla(memory, s);
  memory.reset(mark);
  w.mlp = carve_mlp(memory, s);
}

}  // namespace

Workspace plan_workspace(const ModelConfig& config, const ShardPlan& shard, const ModelLimits& limits, Ops& ops) {
  const Sizes sizes{config, shard, limits, ops.activation()};
  Workspace w;
  Measure measure;
  carve(measure, sizes, w);
  w.arena = Arena(ops.allocate(measure.high_water(), Place::device));
  carve(w.arena, sizes, w);
  return w;
}

Workspace plan_held(const WorkspaceTensors& shared, const ModelConfig& config, const ShardPlan& shard,
                    const ModelLimits& limits, Ops& ops) {
  const Sizes sizes{config, shard, limits, ops.activation()};
  Workspace w;
  static_cast<WorkspaceTensors&>(w) = shared;
  Measure measure;
  carve_carried(measure, sizes, w);
  w.arena = Arena(ops.allocate(measure.high_water(), Place::device));
  carve_carried(w.arena, sizes, w);
  return w;
}

ProbeSpace plan_probe_space(const ModelConfig& config, const ModelLimits& limits, Ops& ops) {
  const int64_t rows = limits.max_rows, pools = limits.max_context / config.kpool + 1;
  const auto bytes = static_cast<size_t>(rows * (pools + config.experts)) * sizeof(float);
  ProbeSpace space;
  space.memory = ops.allocate(bytes, Place::device);
  space.scores = space.memory.view(Dtype::f32, {rows, pools});
  space.router_logits =
      space.memory.view(Dtype::f32, {rows, config.experts}, static_cast<size_t>(rows * pools) * sizeof(float));
  return space;
}

}  // namespace glm53
