#include "engine/model/model.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "common/error.h"
#include "common/strings.h"
#include "engine/model/load.h"
#include "engine/model/model_weights.h"
#include "engine/model/pick_rows.h"
#include "engine/model/workspace.h"

namespace glm53 {
namespace {

CacheGeometry geometry_of(const ModelConfig& c, const ShardPlan& shard, const ModelLimits& limits) {
  CacheGeometry g;
  g.mla_layers = c.mla_layers();
  g.kda_layers = c.kda_layers();
  g.kpool = c.kpool;
  g.latent = c.kv_lora;
  g.index_dim = c.index_dim;
  g.kda_heads = shard.kda_heads;
  g.head_dim = c.kda_dim;
  g.conv_channels = 3 * shard.kda_heads * c.kda_dim;
  g.conv_kernel = c.conv_kernel;
  g.max_window = limits.max_window;
  g.format = limits.kv;
  return g;
}

void check_limits(const ModelLimits& limits, const ModelConfig& config) {
  const auto at_least_one = [](std::string_view what, int value) {
    if (value < 1) throw Error(Code::config, cat("model limit ", what, " is ", value), "at least 1");
  };
  at_least_one("max_rows", limits.max_rows);
  at_least_one("max_seqs", limits.max_seqs);
  at_least_one("max_context", limits.max_context);
  at_least_one("max_window", limits.max_window);
  at_least_one("max_logit_rows", limits.max_logit_rows);
  if (limits.max_context > config.max_positions)
    throw Error(Code::config,
                cat("a context of ", limits.max_context,
                    " tokens is longer than the model's max_position_embeddings = ", config.max_positions),
                "ask for a shorter context");
  for (const int tap : limits.taps)
    if (tap < 0 || tap >= config.layers)
      throw Error(Code::config, cat("a tap behind layer ", tap, " of ", config.layers),
                  cat("layers are numbered 0 to ", config.layers - 1));
}

OpLimits op_limits(const ModelConfig& c, const ShardPlan& shard, const ModelLimits& limits) {
  const auto narrow = [](int64_t v) { return static_cast<int>(v); };
  OpLimits o;
  o.rows = limits.max_rows;
  o.hidden = narrow(c.hidden);
  const int64_t widths[] = {c.streams * c.hidden,
                            int64_t{3} * shard.kda_heads * c.kda_dim,
                            int64_t{shard.heads} * c.kv_lora,
                            int64_t{shard.heads} * c.nope,
                            int64_t{c.index_heads} * c.index_dim,
                            shard.intermediate,
                            shard.shared_intermediate,
                            shard.moe_intermediate,
                            shard.vocab};
  o.widest = narrow(*std::max_element(std::begin(widths), std::end(widths)));
  o.heads = std::max({shard.heads, shard.kda_heads, c.index_heads});
  o.latent = c.kv_lora;
  o.max_context = limits.max_context;
  o.experts = c.experts;
  o.top_k = c.experts_per_token;
  o.vocab = narrow(c.vocab);
  return o;
}

class GlmModel final : public Model {
 public:
  GlmModel(ModelConfig config, std::unique_ptr<WeightSource> source, const ModelLimits& limits, Ops& ops,
           Communicator& comm, const PartLoaded& loaded)
      : config_(std::move(config)),
        limits_(limits),
        ops_(ops),
        comm_(comm),
        shard_(plan_shard(config_, comm.shard().rank, comm.shard().size, false)),
        source_(std::move(source)),
        weights_(config_, shard_, *source_, ledger_, loaded) {
    for (const Layer& layer : weights_.layers) {
      if (const auto* kda = std::get_if<KdaLayer>(&layer.attention)) {
        a_log_.push_back(kda->a_log());
        dt_bias_.push_back(kda->dt_bias());
      }
    }
    space_ = plan_workspace(config_, shard_, limits_, ops_);
    held_ = plan_held(space_, config_, shard_, limits_, ops_);
    ops_.reserve(op_limits(config_, shard_, limits_));
  }

  const ModelConfig& config() const override { return config_; }
  const ModelLimits& limits() const override { return limits_; }
  CacheGeometry geometry() const override { return geometry_of(config_, shard_, limits_); }
  SharedWeights shared() const override { return {&weights_.outer.embed, &weights_.outer.head, shard_}; }
  std::vector<std::pair<std::string, size_t>> weight_bytes() const override { return ledger_.lines(); }

  void set_probe(Probe probe) override {
    probe_ = std::move(probe);
    probe_space_ = probe_ ? plan_probe_space(config_, limits_, ops_) : ProbeSpace{};
  }

  void flush(std::span<const SlotId> slots, std::span<const int> replay, const Caches& caches) override {
    if (slots.empty() || a_log_.empty()) return;
    ops_.kda_flush({slots, replay, &caches, a_log_, dt_bias_, config_.gate_lower_bound});
  }

  ForwardOut forward(const Batch& batch, const Caches& caches) override {
    return pass(batch, caches, space_, {0, config_.layers});
  }

  ForwardOut forward_part(const Batch& batch, const Caches& caches, LayerSpan layers) override {
    if (layers.first != held_at_ && layers.first != 0)
      throw Error(Code::internal, cat("forward: a part begins at layer ", layers.first),
                  cat("the batch stands in front of layer ", held_at_));
    if (layers.first < 0 || layers.last <= layers.first || layers.last > config_.layers)
      throw Error(Code::internal, cat("forward: layers ", layers.first, " to ", layers.last, " of ", config_.layers));
    held_at_ = layers.last % config_.layers;
    return pass(batch, caches, held_, layers);
  }

 private:
  void check(const Batch& batch) const {
    const auto within = [](std::string_view what, int64_t value, int64_t low, int64_t high) {
      if (value < low || value > high)
        throw Error(Code::internal, cat("forward: ", what, " is ", value), cat("expected ", low, " to ", high));
    };
    within("batch capacity", batch.token.rank == 1 ? batch.token.dim(0) : -1, 1, limits_.max_rows);
    within("rows", batch.rows, 0, batch.token.dim(0));
    within("window_rows", batch.window_rows, 0, batch.rows);
    within("seqs", batch.seqs, 0, limits_.max_seqs);
    within("logit_rows", batch.logit_rows, 0, limits_.max_logit_rows);
  }

  ForwardOut pass(const Batch& batch, const Caches& caches, const Workspace& space, LayerSpan layers) {
    check(batch);
    const Step step{ops_, batch, caches, space, probe_, probe_space_, batch.token.dim(0)};
    if (layers.first == 0) {
      embed(step);
      ops_.mhc_pre(pre(step, weights_.layers.front().attention_site));
    }
    for (int i = layers.first; i < layers.last; ++i) run(step, i);
    return layers.last == config_.layers ? head(step) : ForwardOut{};
  }

  /// One layer, and the seam to the next.
  void run(const Step& step, int number) {
    const auto i = static_cast<size_t>(number);
    const Layer& layer = weights_.layers[i];
    const Tensor u = step.rows(step.space.u), y = step.rows(step.space.y);
    step.show("layer", number, "attn.in", u);
    std::visit([&](const auto& attention) { attention.run(step, u, y); }, layer.attention);
    comm_.all_reduce(y);
    step.show("layer", number, "attn.out", y);
    ops_.mhc_post_pre({post(step), pre(step, layer.mlp_site)});
    step.show("layer", number, "mlp.in", u);
    std::visit([&](const auto& mlp) { mlp.run(step, u, y); }, layer.mlp);
    comm_.all_reduce(y);
    step.show("layer", number, "mlp.out", y);
    if (i + 1 < weights_.layers.size()) {
      ops_.mhc_post_pre({post(step), pre(step, weights_.layers[i + 1].attention_site)});
    } else {
      ops_.mhc_post(post(step));
    }
    tap(step, number);
    step.show("layer", number, "streams", step.rows(step.space.streams));
  }

  /// Means of the streams behind a layer that somebody wants to read. The fused operator between layers has completed
  /// them (spec speculative §1.4).
  void tap(const Step& step, int number) const {
    for (size_t t = 0; t < limits_.taps.size(); ++t) {
      if (limits_.taps[t] != number) continue;
      const auto at = static_cast<int64_t>(t) * config_.hidden;
      ops_.stream_mean({step.rows(step.space.streams), step.rows(step.space.taps).columns(at, at + config_.hidden)});
    }
  }

  MhcPreArgs pre(const Step& step, const Site& site) const {
    MhcPreArgs args{};
    args.streams = step.rows(step.space.streams);
    args.site = {&site.fn, &site.base, &site.scale};
    args.norm = &site.norm;
    args.rms_eps = config_.rms_eps;
    args.hc_eps = config_.hc_eps;
    args.sinkhorn = config_.sinkhorn;
    args.post = step.rows(step.space.post);
    args.comb = step.rows(step.space.comb);
    args.u = step.rows(step.space.u);
    return args;
  }

  MhcPostArgs post(const Step& step) const {
    return {step.rows(step.space.streams), step.rows(step.space.y), step.rows(step.space.post),
            step.rows(step.space.comb)};
  }

  /// All streams of a row begin as its embedding.
  void embed(const Step& step) const {
    const Tensor y = step.rows(step.space.y);
    ops_.embed({&step.batch, &weights_.outer.embed, y});
    const Tensor flat = step.rows(step.space.streams).reshaped({step.capacity, config_.streams * config_.hidden});
    for (int s = 0; s < config_.streams; ++s) ops_.copy(flat.columns(s * config_.hidden, (s + 1) * config_.hidden), y);
  }

  ForwardOut head(const Step& step) const {
    const Tensor mean = step.rows(step.space.mean), hidden = step.rows(step.space.hidden);
    ops_.stream_mean({step.rows(step.space.streams), mean});
    ops_.rms_norm({mean, &weights_.outer.norm, config_.rms_eps, hidden});
    if (step.probe) {
      ops_.synchronize();
      probe_("mean", mean);
      probe_("norm", hidden);
    }
    ForwardOut out;
    out.hidden = hidden;
    out.mean = mean;
    if (!limits_.taps.empty()) out.taps = step.rows(step.space.taps);
    const int rows = step.batch.logit_rows;
    if (rows == 0) return out;
    const Tensor picked = step.space.picked.rows(0, rows), part = step.space.logits_part.rows(0, rows);
    pick_rows(ops_, hidden, step.batch.logit_row.rows(0, rows), picked);
    // Few rows, whatever regime they come from: always the window family, so a row's logits never depend on its
    // neighbours.
    ops_.linear({.x = picked, .w = &weights_.outer.head, .y = part, .beta = 0, .window_rows = rows});
    if (shard_.size == 1) {
      out.logits = part;
      return out;
    }
    const Tensor whole = shard_.rank == 0 ? step.space.logits.rows(0, rows) : Tensor{};
    comm_.gather(part, whole);
    out.logits = whole;
    return out;
  }

  ModelConfig config_;
  ModelLimits limits_;
  Ops& ops_;
  Communicator& comm_;
  ShardPlan shard_;
  std::unique_ptr<WeightSource> source_;  // owns the memory of all weights below
  WeightLedger ledger_;
  ModelWeights weights_;
  std::vector<const Weight*> a_log_, dt_bias_;  // of the KDA layers, in order
  Workspace space_, held_;                      // held_: of the batch that forward_part() is taking through
  int held_at_ = 0;                             // the layer in front of which it stands
  Probe probe_;
  ProbeSpace probe_space_;
};

}  // namespace

std::unique_ptr<Model> load_model(ModelConfig config, std::unique_ptr<WeightSource> source, const ModelLimits& limits,
                                  Ops& ops, Communicator& comm, const PartLoaded& loaded) {
  check_limits(limits, config);
  return std::make_unique<GlmModel>(std::move(config), std::move(source), limits, ops, comm, loaded);
}

}  // namespace glm53
