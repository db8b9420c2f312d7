// Single modules of tiny-random fed with their reference inputs, so that an error cannot hide behind another.
#include <algorithm>
#include <cmath>
#include <set>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "engine/loader/source.h"
#include "engine/model/kda.h"
#include "engine/model/mla.h"
#include "engine/model/mlp.h"
#include "tests/golden/model_harness.h"

namespace glm53::golden {
namespace {

constexpr float kTolerance = 1e-4f;

/// One prompt of one sequence in the chunk regime, and everything a layer needs to run on it.
class Bench {
 public:
  Bench(Ops& ops, int rows)
      : ops_(ops), rows_(rows), config_(load_model_config(tiny_random())), shard_(plan_shard(config_, 0, 1, false)) {
    ModelLimits limits;
    limits.max_rows = rows;
    limits.max_context = 320;
    source_ = open_checkpoint(tiny_random(), FormatPolicy::as_stored(), {0, 1}, ops);
    space_ = plan_workspace(config_, shard_, limits, ops);
    probe_space_ = plan_probe_space(config_, limits, ops);
    CacheGeometry g;
    g.mla_layers = config_.mla_layers();
    g.kda_layers = config_.kda_layers();
    g.kpool = config_.kpool;
    g.latent = config_.kv_lora;
    g.index_dim = config_.index_dim;
    g.kda_heads = config_.kda_heads;
    g.head_dim = config_.kda_dim;
    g.conv_channels = 3 * config_.kda_heads * config_.kda_dim;
    owned_ = make_caches(g, {6, 1, 0}, ops);
    make_batch();
    probe_ = [this](const std::string& name, Tensor value) { seen[name] = fetch(ops_, value); };
  }

  /// Runs body(step, x, y) with x = `in`; returns y.
  template <class Body>
  Values run(const Values& in, const Body& body) {
    x_ = upload(ops_, Dtype::f32, in);
    const Step step{ops_, batch_, owned_.caches, space_, probe_, probe_space_, rows_};
    const Tensor y = step.rows(space_.y);
    body(step, x_.view(Dtype::f32, {rows_, config_.hidden}), y);
    return fetch(ops_, y);
  }

  WeightReader reader(const std::string& under) {
    return WeightReader(*source_, ledger_, "model.language_model.").under(under);
  }
  const ModelConfig& config() const { return config_; }
  const ShardPlan& shard() const { return shard_; }
  const Caches& caches() const { return owned_.caches; }

  std::map<std::string, Values> seen;

 private:
  void make_batch() {
    const int blocks = 5;
    std::vector<int32_t> v;
    const auto put = [&](std::initializer_list<int64_t> shape, const std::vector<int32_t>& values) {
      ints_.push_back(ops_.allocate(values.size() * sizeof(int32_t), Place::pinned));
      std::copy(values.begin(), values.end(), reinterpret_cast<int32_t*>(ints_.back().data()));
      return ints_.back().view(Dtype::i32, shape);
    };
    for (int i = 0; i < rows_; ++i) v.push_back(i);
    batch_.rows = rows_;
    batch_.seqs = 1;
    batch_.token = put({rows_}, v);
    batch_.position = put({rows_}, v);
    batch_.row_seq = put({rows_}, std::vector<int32_t>(static_cast<size_t>(rows_), 0));
    batch_.row_begin = put({2}, {0, rows_});
    batch_.slot = put({1}, {0});
    batch_.committed = put({1}, {0});
    batch_.replay = put({1}, {0});
    batch_.block_table = put({1, blocks}, {1, 2, 3, 4, 5});
    batch_.export_pos = put({1, 2}, {-1, -1});
    batch_.export_snap = put({1, 2}, {-1, -1});
  }

  Ops& ops_;
  int rows_;
  ModelConfig config_;
  ShardPlan shard_;
  std::unique_ptr<WeightSource> source_;
  WeightLedger ledger_;
  Workspace space_;
  ProbeSpace probe_space_;
  OwnedCaches owned_;
  Batch batch_;
  std::vector<Buffer> ints_;
  Buffer x_;
  Probe probe_;
};

/// Convolution history [3][C] against the reference's [C][4], newest three columns.
float history_difference(const Values& conv, const Values& expected) {
  float worst = 0;
  for (int64_t c = 0; c < expected.rows(); ++c)
    for (int64_t j = 0; j < 3; ++j)
      worst =
          std::max(worst, std::abs(conv.row(j)[static_cast<size_t>(c)] - expected.row(c)[static_cast<size_t>(j + 1)]));
  return worst;
}

TEST_CASE("tiny-random: KDA layers 0 and 4") {
  const Reference golden(tiny_random("golden_modules.safetensors"));
  for_each_backend([&](Ops& ops) {
    for (const int layer : {0, 4}) {
      CAPTURE(layer);
      const std::string kda = cat("kda", layer, ".");
      Bench bench(ops, 65);
      const int cache_layer = bench.config().kind_index(layer);
      const KdaLayer module(bench.reader(cat("layers.", layer, ".self_attn.")), bench.config(), bench.shard(), layer,
                            cache_layer);
      const Values out = bench.run(golden.values(kda + "in"),
                                   [&](const Step& s, const Tensor& x, const Tensor& y) { module.run(s, x, y); });
      CHECK(largest_difference(out, golden.values(kda + "out")) < kTolerance);
      CHECK(largest_difference(fetch(ops, bench.caches().state[0][cache_layer]), golden.values(kda + "state")) <
            kTolerance);
      CHECK(history_difference(fetch(ops, bench.caches().conv[0][cache_layer]), golden.values(kda + "conv_state")) <
            kTolerance);
      if (layer != 0) continue;
      for (const char* name : {"q", "k", "v", "core"}) {
        CAPTURE(name);
        CHECK(largest_difference(bench.seen.at(kda + name), golden.values(kda + name)) < kTolerance);
      }
      // Raw gate and beta, through the formulas of the operator's contract.
      const WeightReader weights = bench.reader("layers.0.self_attn.");
      const Values a_log = fetch(ops, weights.take("A_log", WeightGroup::exact).codes),
                   dt_bias = fetch(ops, weights.take("dt_bias", WeightGroup::exact).codes);
      Values decay = bench.seen.at(kda + "gate"), beta = bench.seen.at(kda + "beta");
      const auto sigmoid = [](float v) { return 1 / (1 + std::exp(-v)); };
      for (size_t i = 0; i < decay.data.size(); ++i) {
        const size_t channel = i % dt_bias.data.size(), head = channel / static_cast<size_t>(bench.config().kda_dim);
        decay.data[i] = bench.config().gate_lower_bound *
                        sigmoid(std::exp(a_log.data[head]) * (decay.data[i] + dt_bias.data[channel]));
      }
      for (float& b : beta.data) b = sigmoid(b);
      CHECK(largest_difference(decay, golden.values(kda + "g")) < kTolerance);
      CHECK(largest_difference(beta, golden.values(kda + "beta")) < kTolerance);
    }
  });
}

TEST_CASE("tiny-random: MLA layer 3 and its indexer") {
  const Reference golden(tiny_random("golden_modules.safetensors"));
  for_each_backend([&](Ops& ops) {
    Bench bench(ops, 300);
    const MlaLayer module(bench.reader("layers.3.self_attn."), bench.config(), bench.shard(), 3, 0, false);
    const Values out = bench.run(golden.values("mla3.in"),
                                 [&](const Step& s, const Tensor& x, const Tensor& y) { module.run(s, x, y); });
    CHECK(largest_difference(out, golden.values("mla3.out")) < kTolerance);
    CHECK(largest_difference(bench.seen.at("mla3.q_rank"), golden.values("mla3.q_resid")) < kTolerance);
    CHECK(largest_difference(bench.seen.at("mla3.latent"), golden.values("mla3.latent")) < kTolerance);
    CHECK(largest_difference(bench.seen.at("mla3.q"), golden.values("mla3.q")) < kTolerance);

    const int kpool = bench.config().kpool, top = bench.config().top_pools();
    const Values topk = golden.values("mla3.topk"), scores = golden.values("mla3.index_scores"),
                 keys = golden.values("mla3.pool_keys");
    const Values &selected = bench.seen.at("mla3.selected"), &count = bench.seen.at("mla3.n_selected"),
                 &ours = bench.seen.at("mla3.scores");
    float worst = 0;
    int scored = 0;
    for (int64_t t = 0; t < 300; ++t) {
      std::set<int> expected, found;
      for (const float token : topk.row(t))
        if (token >= 0 && (static_cast<int>(token) / kpool + 1) * kpool <= t + 1)
          expected.insert(static_cast<int>(token) / kpool);
      const auto pools = selected.row(t);
      for (int i = 0; i < static_cast<int>(count.data[static_cast<size_t>(t)]); ++i)
        found.insert(static_cast<int>(pools[static_cast<size_t>(i)]));
      CAPTURE(t);
      CHECK(found == expected);
      const int64_t candidates = (t + 1) / kpool;
      if (candidates <= top) continue;  // all are taken without scoring
      ++scored;
      for (int64_t p = 0; p < candidates; ++p)
        worst = std::max(worst, std::abs(ours.row(t)[static_cast<size_t>(p)] - scores.row(t)[static_cast<size_t>(p)]));
    }
    CHECK(scored > 200);
    CHECK(worst < kTolerance);

    // Pool keys lie in the blocks; four pools of 16 tokens a block.
    const BlockLayout layout = block_layout(bench.caches().geometry);
    for (int64_t p = 0; p < keys.rows(); ++p) {
      const Tensor block = bench.caches().blocks[1 + p * kpool / kBlockTokens];
      const int64_t pools_a_block = kBlockTokens / kpool,
                    begin = static_cast<int64_t>(layout.pool_keys) + p % pools_a_block * keys.width() * 4;
      const Tensor bytes = block.columns(begin, begin + keys.width() * 4);
      const Tensor key = Tensor::of(bytes.data, Dtype::f32, {keys.width()}, bytes.place);
      CHECK(largest_difference(fetch(ops, key), keys.part(p, p + 1)) < kTolerance);
    }
  });
}

TEST_CASE("tiny-random: dense MLP, router and experts") {
  const Reference golden(tiny_random("golden_modules.safetensors"));
  for_each_backend([&](Ops& ops) {
    Bench bench(ops, 65);
    const SwigluMlp dense(bench.reader("layers.0.mlp."), WeightGroup::dense_mlp, bench.config().swiglu_limit);
    const Values mlp = bench.run(golden.values("mlp0.in"),
                                 [&](const Step& s, const Tensor& x, const Tensor& y) { dense.run(s, x, y); });
    CHECK(largest_difference(mlp, golden.values("mlp0.out")) < kTolerance);

    const MoeMlp experts(bench.reader("layers.2.mlp."), bench.config(), 2);
    const Values moe = bench.run(golden.values("moe2.in"),
                                 [&](const Step& s, const Tensor& x, const Tensor& y) { experts.run(s, x, y); });
    CHECK(largest_difference(moe, golden.values("moe2.out")) < kTolerance);
    CHECK(largest_difference(bench.seen.at("moe2.routed"), golden.values("moe2.routed_out")) < kTolerance);
    CHECK(largest_difference(bench.seen.at("router2.logits"), golden.values("router2.logits")) < kTolerance);
    const SwigluMlp shared(bench.reader("layers.2.mlp.shared_experts."), WeightGroup::shared_expert,
                           bench.config().swiglu_limit);
    const Values alone = bench.run(golden.values("moe2.in"),
                                   [&](const Step& s, const Tensor& x, const Tensor& y) { shared.run(s, x, y); });
    CHECK(largest_difference(alone, golden.values("moe2.shared_out")) < kTolerance);

    // The reference's order inside a row means nothing: compare as sets of (expert, weight).
    const Values index = golden.values("router2.index"), weight = golden.values("router2.weights");
    for (int64_t t = 0; t < 65; ++t) {
      std::map<int, float> expected;
      for (size_t i = 0; i < index.row(t).size(); ++i) expected[static_cast<int>(index.row(t)[i])] = weight.row(t)[i];
      const auto ours = bench.seen.at("router2.index").row(t), with = bench.seen.at("router2.weight").row(t);
      REQUIRE(ours.size() == expected.size());
      for (size_t i = 0; i < ours.size(); ++i) {
        REQUIRE(expected.contains(static_cast<int>(ours[i])));
        CHECK(std::abs(expected[static_cast<int>(ours[i])] - with[i]) < kTolerance);
      }
    }
  });
}

TEST_CASE("tiny-random: mHC sites") {
  const Reference golden(tiny_random("golden_modules.safetensors"));
  for_each_backend([&](Ops& ops) {
    Bench bench(ops, 65);
    for (const auto& [name, under, site] :
         {std::tuple{"hc_attn1", "layers.1.", "hc_attn"}, std::tuple{"hc_ffn2", "layers.2.", "hc_ffn"}}) {
      CAPTURE(name);
      const WeightReader layer = bench.reader(under);
      const Weight fn = layer.take(cat(site, "_fn"), WeightGroup::exact),
                   base = layer.take(cat(site, "_base"), WeightGroup::exact),
                   scale = layer.take(cat(site, "_scale"), WeightGroup::exact);
      const int64_t n = bench.config().streams, hidden = bench.config().hidden;
      const Buffer in = upload(ops, Dtype::f32, golden.values(cat(name, ".in")));
      const Buffer memory = ops.allocate(static_cast<size_t>(65 * (n + n * n + hidden)) * sizeof(float), Place::device);
      const auto offset = [](int64_t values) { return static_cast<size_t>(65 * values) * sizeof(float); };
      MhcPreArgs args{};
      args.streams = in.view(Dtype::f32, {65, n, hidden});
      args.site = {&fn, &base, &scale};
      args.rms_eps = bench.config().rms_eps;
      args.hc_eps = bench.config().hc_eps;
      args.sinkhorn = bench.config().sinkhorn;
      args.post = memory.view(Dtype::f32, {65, n});
      args.comb = memory.view(Dtype::f32, {65, n, n}, offset(n));
      args.u = memory.view(Dtype::f32, {65, hidden}, offset(n + n * n));
      ops.mhc_pre(args);
      CHECK(largest_difference(fetch(ops, args.post), golden.values(cat(name, ".post"))) < kTolerance);
      CHECK(largest_difference(fetch(ops, args.comb), golden.values(cat(name, ".comb"))) < kTolerance);
      CHECK(largest_difference(fetch(ops, args.u), golden.values(cat(name, ".collapsed"))) < kTolerance);
    }
  });
}

TEST_CASE("tiny-random: the whole of layer 1") {
  const Reference golden(tiny_random("golden_modules.safetensors"));
  for_each_backend([&](Ops& ops) {
    constexpr int kRows = 65;
    Bench bench(ops, kRows);
    const ModelConfig& config = bench.config();
    const int64_t n = config.streams, hidden = config.hidden;
    const WeightReader layer = bench.reader("layers.1.");
    const auto exact = [&](const std::string& name) { return layer.take(name, WeightGroup::exact); };
    const Weight fn[] = {exact("hc_attn_fn"), exact("hc_ffn_fn")},
                 base[] = {exact("hc_attn_base"), exact("hc_ffn_base")},
                 scale[] = {exact("hc_attn_scale"), exact("hc_ffn_scale")},
                 norm[] = {exact("input_layernorm.weight"), exact("post_attention_layernorm.weight")};
    const KdaLayer attention(bench.reader("layers.1.self_attn."), config, bench.shard(), 1, config.kind_index(1));
    const SwigluMlp mlp(bench.reader("layers.1.mlp."), WeightGroup::dense_mlp, config.swiglu_limit);

    const Buffer streams = upload(ops, Dtype::f32, golden.values("layer1.in"));
    const Buffer memory =
        ops.allocate(static_cast<size_t>(kRows * (n + n * n + hidden)) * sizeof(float), Place::device);
    const auto offset = [](int64_t values) { return static_cast<size_t>(kRows * values) * sizeof(float); };
    const Tensor x = streams.view(Dtype::f32, {kRows, n, hidden});
    const auto before = [&](int site) {
      return MhcPreArgs{x,
                        {&fn[site], &base[site], &scale[site]},
                        &norm[site],
                        config.rms_eps,
                        config.hc_eps,
                        config.sinkhorn,
                        memory.view(Dtype::f32, {kRows, n}),
                        memory.view(Dtype::f32, {kRows, n, n}, offset(n)),
                        memory.view(Dtype::f32, {kRows, hidden}, offset(n + n * n))};
    };
    bench.run(golden.values("layer1.in"), [&](const Step& step, const Tensor&, const Tensor& y) {
      ops.mhc_pre(before(0));
      attention.run(step, before(0).u, y);
      const MhcPostArgs after{x, y, before(0).post, before(0).comb};
      ops.mhc_post_pre({after, before(1)});
      mlp.run(step, before(1).u, y);
      ops.mhc_post(after);
    });
    CHECK(largest_difference(fetch(ops, x), golden.values("layer1.out")) < kTolerance);
  });
}

}  // namespace
}  // namespace glm53::golden
