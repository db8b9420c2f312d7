// The DFlash2 drafter at work: context injection after each pass of the target (spec speculative §1.5, §1.11), and the
// forward of a block with candidates and walk (§1.6 – §1.10).
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "common/error.h"
#include "common/strings.h"
#include "engine/draft/context.h"
#include "engine/draft/dflash_weights.h"
#include "engine/draft/observed.h"
#include "engine/draft/staging.h"
#include "engine/draft/target_head.h"
#include "engine/loader/source.h"
#include "engine/model/pick_rows.h"
#include "kernels/draft_ops.h"

namespace glm53 {
namespace {

constexpr float kNoLimit = std::numeric_limits<float>::infinity();  // SwiGLU of the drafter does not clamp

/// Positions that a slot's ring holds: the window behind a block's first row, and the rows of a verification that may
/// be rejected (§1.11), in whole cache lines.
int ring_of(const DflashConfig& c, int max_window) {
  constexpr int kMultiple = 64;
  return (c.window - 1 + max_window + kMultiple - 1) / kMultiple * kMultiple;
}

class DflashDrafter final : public Drafter {
 public:
  DflashDrafter(const std::string& dir, const FormatPolicy& policy, Model& target, Ops& ops, Communicator& comm)
      : config_(load_dflash_config(dir)),
        target_(target),
        ops_(ops),
        comm_(comm),
        ring_(ring_of(config_, target.limits().max_window)) {
    check_dflash_fits(config_, target.config());
    if (target.limits().taps != config_.tap_layers)
      throw Error(Code::internal, "the target was loaded without this drafter's taps",
                  "set ModelLimits::taps to the drafter's target_layer_ids");
    shard_ = plan_dflash_shard(config_, comm.shard());
    auto checkpoint = std::make_shared<const Checkpoint>(dir);
    const auto names = check_dflash_inventory(*checkpoint, config_);
    source_ = make_checkpoint_source(checkpoint, policy, comm.shard(), ops);
    weights_ = load_dflash_weights(names, config_, *source_, ledger_);
    plan_memory();
    reserve();
  }

  DraftTraits traits() const override { return {"dflash2", true, config_.block - 1, config_.window - 1}; }
  std::vector<std::pair<std::string, size_t>> weight_bytes() const override { return ledger_.lines(); }
  void set_probe(Probe probe) override { probe_ = std::move(probe); }

  PoolUnit pool_unit() const override {
    PoolUnit unit;
    unit.slot = unit.snap = 2 * static_cast<size_t>(config_.layers * int64_t{ring_} * kv_width()) * size_of(act());
    return unit;
  }
  void make_pools(const PoolSizes& sizes) override {
    const auto pool = [&](int ids) {
      DraftCache cache;
      if (ids == 0) return cache;
      cache.keys = store_.take(act(), {ids, config_.layers, ring_, kv_width()});
      cache.values = store_.take(act(), {ids, config_.layers, ring_, kv_width()});
      return cache;
    };
    cache_ = pool(sizes.slots);
    saved_ = pool(sizes.snaps);
    context_.emplace(sizes.slots, sizes.snaps, ring_);
  }

  void observe(const Batch& batch, const ForwardOut& out) override;
  void propose(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;

  void reset(SlotId slot) override { context().begin_at(slot, 0); }
  void invalidate(SlotId slot, int32_t position) override { context().begin_at(slot, position); }
  void forget(SnapId snap) override { context().forget(snap); }
  void copy_block(BlockId, BlockId) override {}  // nothing of this drafter lies in blocks
  void save(SlotId slot, int32_t position, SnapId snap) override {
    context().save(slot, position, snap);
    copy_ring(saved_, static_cast<int32_t>(snap), cache_, static_cast<int32_t>(slot));
  }
  void restore(SnapId snap, SlotId slot, int32_t position) override {
    if (context().restore(snap, slot, position))
      copy_ring(cache_, static_cast<int32_t>(slot), saved_, static_cast<int32_t>(snap));
  }

 private:
  Dtype act() const { return ops_.activation(); }
  int64_t kv_width() const { return int64_t{shard_.kv_heads} * config_.head_dim; }
  int64_t q_width() const { return int64_t{shard_.heads} * config_.head_dim; }
  DraftContext& context() {
    if (!context_) throw Error(Code::internal, "dflash2: used before make_pools()");
    return *context_;
  }
  void show(const std::string& name, const Tensor& value) const {
    if (!probe_) return;
    ops_.synchronize();
    probe_(name, value);
  }
  void copy_ring(const DraftCache& to, int64_t to_id, const DraftCache& from, int64_t from_id) {
    ops_.copy(to.keys[to_id], from.keys[from_id]);
    ops_.copy(to.values[to_id], from.values[from_id]);
  }

  void plan_memory();
  void reserve();
  void project(const Batch& batch, const ForwardOut& out);
  void write(std::span<const int32_t> slot, std::span<const int32_t> position);
  void propose_some(std::span<const DraftRequest> requests, std::span<Draft> drafts);
  void forward(int64_t blocks);
  void attention(const DflashLayer& layer, int number, int64_t rows);
  void mlp(const DflashLayer& layer, int64_t rows);
  void convolve(const DflashConv& conv, const Tensor& x, int side, const Tensor& out);
  void heads_norm_rope(const Tensor& x, const Weight& norm, const Tensor& position);
  void walk(int64_t blocks);
  void linear(const Tensor& x, const Weight& w, const Tensor& y) {
    ops_.linear({.x = x, .w = &w, .y = y, .beta = 0, .window_rows = static_cast<int>(x.dim(0))});
  }

  /// Of a pass of the target: act [R][·].
  struct ContextSpace {
    Tensor hidden;             ///< h_ctx, [R][H]
    std::vector<Tensor> k, v;  ///< by layer, [R][kv]
  };
  /// Of a block forward; B = sequences at a time, act [B·block][·].
  struct BlockSpace {
    Tensor h, u, w, y;  ///< [·][H]: residual, input of a sublayer before and after its convolution, output
    Tensor delta;       ///< what the input adds to the coefficients
    Tensor q, k, v, o;  ///< [·][heads · dim]
    Tensor gate, up;    ///< [·][MLP width of this rank]
    Tensor z, picked;   ///< [·][H]; picked [B·(block−1)][H]: rows that predict
    Tensor selector;    ///< f32 [B·(block−1)][rank]
    Tensor token, score, token_host, score_host;  ///< of the walk: i32 [B·(block−1)], f32 [·][top k]
  };
  /// Lists of integers of a block forward.
  enum List : size_t { kIds, kRowPosition, kPredicting, kSlot, kPosition, kBegin, kEnd, kAnchor, kLists };

  const DflashConfig config_;
  Model& target_;
  Ops& ops_;
  Communicator& comm_;
  const int ring_;
  DflashShard shard_;
  std::unique_ptr<WeightSource> source_;  // owns the memory of the weights
  WeightLedger ledger_;
  DflashWeights weights_;
  TensorStore store_{ops_};
  std::optional<TargetHead> head_;
  ContextSpace pass_;
  BlockSpace block_;
  std::optional<IntLists<2>> pass_lists_;
  std::optional<IntLists<kLists>> block_lists_;
  std::array<Tensor, kLists> at_{};
  DraftCache cache_, saved_;
  std::optional<DraftContext> context_;
  Probe probe_;
};

void DflashDrafter::plan_memory() {
  const ModelLimits& limits = target_.limits();
  const int64_t h = config_.hidden, rows = limits.max_rows, blocks = limits.max_seqs, block = config_.block;
  const int64_t all = blocks * block, drafts = blocks * (block - 1);
  pass_.hidden = store_.take(act(), {rows, h});
  for (int i = 0; i < config_.layers; ++i) {
    pass_.k.push_back(store_.take(act(), {rows, kv_width()}));
    pass_.v.push_back(store_.take(act(), {rows, kv_width()}));
  }
  for (Tensor* t : {&block_.h, &block_.u, &block_.w, &block_.y, &block_.z}) *t = store_.take(act(), {all, h});
  block_.delta = store_.take(act(), {all, int64_t{2} * config_.conv_kernel * (h / config_.conv_group)});
  block_.q = store_.take(act(), {all, q_width()});
  block_.o = store_.take(act(), {all, q_width()});
  block_.k = store_.take(act(), {all, kv_width()});
  block_.v = store_.take(act(), {all, kv_width()});
  block_.gate = store_.take(act(), {all, shard_.intermediate});
  block_.up = store_.take(act(), {all, shard_.intermediate});
  block_.picked = store_.take(act(), {drafts, h});
  block_.selector = store_.take(Dtype::f32, {drafts, config_.selector_rank});
  block_.token = store_.take(Dtype::i32, {drafts});
  block_.score = store_.take(Dtype::f32, {drafts, config_.selector_top_k});
  block_.token_host = store_.take(Dtype::i32, {drafts}, Place::pinned);
  block_.score_host = store_.take(Dtype::f32, {drafts, config_.selector_top_k}, Place::pinned);
  head_.emplace(target_.shared(), ops_, comm_, drafts, config_.selector_top_k);
  pass_lists_.emplace(ops_, rows);
  block_lists_.emplace(ops_, all);
}

void DflashDrafter::reserve() {
  OpLimits o;
  o.rows = std::max(target_.limits().max_rows, target_.limits().max_seqs * config_.block);
  o.hidden = static_cast<int>(config_.hidden);
  o.widest = static_cast<int>(std::max({config_.hidden * static_cast<int64_t>(config_.tap_layers.size()), q_width(),
                                        shard_.intermediate, target_.shared().shard.vocab}));
  o.heads = shard_.heads;
  o.max_context = target_.limits().max_context;
  o.vocab = static_cast<int>(config_.vocab);
  ops_.reserve(o);
}

/// Keys and values of all rows of a pass, for every layer.
void DflashDrafter::project(const Batch& batch, const ForwardOut& out) {
  const int64_t rows = out.taps.dim(0);
  const Tensor h = pass_.hidden.rows(0, rows);
  const auto linear_of_pass = [&](const Tensor& x, const Weight& w, const Tensor& y) {
    ops_.linear({.x = x, .w = &w, .y = y, .beta = 0, .window_rows = batch.window_rows});
  };
  linear_of_pass(out.taps, weights_.fc, h);
  ops_.rms_norm({h, &weights_.hidden_norm, config_.rms_eps, h});
  show("h_ctx", h);
  for (size_t i = 0; i < weights_.layers.size(); ++i) {
    const DflashLayer& layer = weights_.layers[i];
    const Tensor k = pass_.k[i].rows(0, rows), v = pass_.v[i].rows(0, rows);
    linear_of_pass(h, layer.k, k);
    linear_of_pass(h, layer.v, v);
    heads_norm_rope(k, layer.k_norm, batch.position.rows(0, rows));
    show(cat("layer", i, ".k_ctx"), k);
    show(cat("layer", i, ".v_ctx"), v);
  }
}

/// Puts projected rows into the rings; rows of slot −1 stay out.
void DflashDrafter::write(std::span<const int32_t> slot, std::span<const int32_t> position) {
  pass_lists_->begin();
  const Tensor slots = pass_lists_->put(0, slot), positions = pass_lists_->put(1, position);
  const int64_t rows = slots.dim(0);
  for (int i = 0; i < config_.layers; ++i) {
    const auto at = static_cast<size_t>(i);
    ops_.draft_write({&cache_, i, slots, positions, pass_.k[at].rows(0, rows), pass_.v[at].rows(0, rows)});
  }
  pass_lists_->end();
}

void DflashDrafter::observe(const Batch& batch, const ForwardOut& out) {
  DraftContext& context = this->context();
  if (out.taps.empty() || out.taps.dim(1) != static_cast<int64_t>(config_.tap_layers.size()) * config_.hidden)
    throw Error(Code::internal, "dflash2: a pass without taps");
  if (batch.rows == 0) return;
  project(batch, out);
  // A piece is written up to its first export, saved, and so on: the ring may not hold what lies before an export any
  // more when the piece is through.
  std::vector<ObservedPiece> pieces = observed_pieces(batch);
  std::vector<int32_t> slot(static_cast<size_t>(batch.rows)), position(slot.size());
  std::copy_n(batch.position.as<const int32_t>(), batch.rows, position.begin());
  while (!pieces.empty()) {
    std::fill(slot.begin(), slot.end(), -1);
    for (const ObservedPiece& p : pieces) {
      const int32_t n = p.stop() - p.position;
      // Rows that later ones of this piece would overwrite.
      for (int32_t i = std::max(0, n - ring_); i < n; ++i)
        slot[static_cast<size_t>(p.row + i)] = static_cast<int32_t>(p.slot);
      context.extend(p.slot, p.position, n);
    }
    write(slot, position);
    for (const ObservedPiece& p : pieces)
      if (!p.exports.empty()) save(p.slot, p.exports.front().first, p.exports.front().second);
    std::erase_if(pieces, [](ObservedPiece& p) { return !p.advance(); });
  }
}

void DflashDrafter::heads_norm_rope(const Tensor& x, const Weight& norm, const Tensor& position) {
  const int64_t heads = x.dim(1) / config_.head_dim;
  const Tensor by_head = x.reshaped({x.dim(0) * heads, config_.head_dim});
  ops_.rms_norm({by_head, &norm, config_.rms_eps, by_head});
  ops_.rope({x, position, config_.head_dim, config_.rope_theta});
}

void DflashDrafter::convolve(const DflashConv& conv, const Tensor& x, int side, const Tensor& out) {
  ops_.block_conv({.x = x,
                   .delta = block_.delta.rows(0, x.dim(0)),
                   .base = &conv.base,
                   .side = side,
                   .block = config_.block,
                   .kernel = config_.conv_kernel,
                   .group = config_.conv_group,
                   .out = out});
}

/// h += conv(o_proj · attention(conv(norm h))); the coefficients of both convolutions come from norm h.
void DflashDrafter::attention(const DflashLayer& layer, int number, int64_t rows) {
  const auto part = [&](const Tensor& t) { return t.rows(0, rows); };
  const Tensor h = part(block_.h), u = part(block_.u), w = part(block_.w), y = part(block_.y);
  ops_.rms_norm({h, &layer.input_norm, config_.rms_eps, u});
  linear(u, layer.attention_conv.projection, part(block_.delta));
  convolve(layer.attention_conv, u, 0, w);
  const Tensor q = part(block_.q), k = part(block_.k), v = part(block_.v), o = part(block_.o);
  linear(w, layer.q, q);
  linear(w, layer.k, k);
  linear(w, layer.v, v);
  heads_norm_rope(q, layer.q_norm, at_[kRowPosition]);
  heads_norm_rope(k, layer.k_norm, at_[kRowPosition]);
  ops_.draft_attention({.cache = &cache_,
                        .layer = number,
                        .q = q,
                        .k = k,
                        .v = v,
                        .slot = at_[kSlot],
                        .position = at_[kPosition],
                        .begin = at_[kBegin],
                        .end = at_[kEnd],
                        .block = config_.block,
                        .heads = shard_.heads,
                        .dim = config_.head_dim,
                        .window = config_.window,
                        .scale = 1.0F / std::sqrt(static_cast<float>(config_.head_dim)),
                        .out = o});
  linear(o, layer.o, y);
  comm_.all_reduce(y);
  convolve(layer.attention_conv, y, 1, w);
  ops_.add({h, w});
  show(cat("layer", number, ".attention"), h);
}

void DflashDrafter::mlp(const DflashLayer& layer, int64_t rows) {
  const auto part = [&](const Tensor& t) { return t.rows(0, rows); };
  const Tensor h = part(block_.h), u = part(block_.u), w = part(block_.w), y = part(block_.y);
  ops_.rms_norm({h, &layer.post_norm, config_.rms_eps, u});
  linear(u, layer.mlp_conv.projection, part(block_.delta));
  convolve(layer.mlp_conv, u, 0, w);
  const Tensor gate = part(block_.gate), up = part(block_.up);
  linear(w, layer.gate, gate);
  linear(w, layer.up, up);
  ops_.swiglu({gate, up, kNoLimit, gate});
  linear(gate, layer.down, y);
  comm_.all_reduce(y);
  convolve(layer.mlp_conv, y, 1, w);
  ops_.add({h, w});
}

void DflashDrafter::forward(int64_t blocks) {
  const int64_t rows = blocks * config_.block;
  const Tensor h = block_.h.rows(0, rows), z = block_.z.rows(0, rows);
  Batch batch;
  batch.rows = static_cast<int>(rows);
  batch.token = at_[kIds];
  ops_.embed({&batch, target_.shared().embedding, h});
  for (int i = 0; i < config_.layers; ++i) {
    const DflashLayer& layer = weights_.layers[static_cast<size_t>(i)];
    attention(layer, i, rows);
    mlp(layer, rows);
    show(cat("layer", i, ".out"), h);
  }
  ops_.rms_norm({h, &weights_.norm, config_.rms_eps, z});
  show("z", z);
}

/// Candidates of every row that predicts, and the walk through them; leaves tokens and scores on the host.
void DflashDrafter::walk(int64_t blocks) {
  const int64_t drafts = blocks * (config_.block - 1);
  const auto part = [&](const Tensor& t) { return t.rows(0, drafts); };
  const Tensor picked = part(block_.picked), selector = part(block_.selector);
  pick_rows(ops_, block_.z.rows(0, blocks * config_.block), at_[kPredicting], picked);
  const TargetHead::Best best = head_->best(picked);
  linear(picked, weights_.selector_hidden, selector);
  ops_.selector_walk({.unary = best.value,
                      .candidate = best.id,
                      .hidden = selector,
                      .predecessor = &weights_.predecessor,
                      .successor = &weights_.successor,
                      .anchor = at_[kAnchor],
                      .token = part(block_.token),
                      .score = part(block_.score)});
  show("unary", best.value);
  show("candidates", best.id);
  show("scores", part(block_.score));
  ops_.copy(part(block_.token_host), part(block_.token));
  ops_.copy(part(block_.score_host), part(block_.score));
  ops_.synchronize();
}

void DflashDrafter::propose(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  check_requests(requests, drafts, traits().max_drafts);
  const auto most = static_cast<size_t>(target_.limits().max_seqs);
  for (size_t i = 0; i < requests.size(); i += most) {
    const size_t n = std::min(most, requests.size() - i);
    propose_some(requests.subspan(i, n), drafts.subspan(i, n));
  }
}

void DflashDrafter::propose_some(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  std::array<std::vector<int32_t>, kLists> values;
  for (const DraftRequest& r : requests) {
    const ContextRange range = context().readable(r.slot, r.position);
    values[kSlot].push_back(static_cast<int32_t>(r.slot));
    values[kPosition].push_back(r.position);
    values[kBegin].push_back(range.begin);
    values[kEnd].push_back(range.end);
    values[kAnchor].push_back(r.anchor);
    for (int i = 0; i < config_.block; ++i) {
      if (i > 0) values[kPredicting].push_back(static_cast<int32_t>(values[kIds].size()));
      values[kIds].push_back(i == 0 ? r.anchor : config_.mask_token);
      values[kRowPosition].push_back(r.position + i);
    }
  }
  block_lists_->begin();
  for (size_t i = 0; i < kLists; ++i) at_[i] = block_lists_->put(i, values[i]);
  const auto blocks = static_cast<int64_t>(requests.size());
  forward(blocks);
  walk(blocks);
  block_lists_->end();
  const auto steps = static_cast<size_t>(config_.block - 1), k = static_cast<size_t>(config_.selector_top_k);
  for (size_t b = 0; b < requests.size(); ++b) {
    drafts[b] = {};
    for (size_t i = b * steps; i < b * steps + static_cast<size_t>(requests[b].drafts); ++i) {
      const int32_t token = block_.token_host.as<const int32_t>()[i];
      if (token < 0) break;
      drafts[b].tokens.push_back(token);
      drafts[b].confidence.push_back(share_of_best({block_.score_host.as<const float>() + i * k, k}));
    }
  }
}

}  // namespace

std::unique_ptr<Drafter> make_dflash_drafter(const std::string& dir, const FormatPolicy& policy, Model& target,
                                             Ops& ops, Communicator& comm) {
  return std::make_unique<DflashDrafter>(dir, policy, target, ops, comm);
}

}  // namespace glm53
