#include "bench/step_ops.h"

#include <array>

#include "kernels/half.h"

namespace glm53 {
namespace {

constexpr int64_t kHidden = 4096, kStreams = 4, kHeads = 32, kKdaDim = 128, kLatent = 512, kNope = 256, kValue = 256;
constexpr int64_t kIndexHeads = 32, kIndexDim = 128, kPool = 4, kTopPools = 512, kExperts = 288;
constexpr int kLayers = 8;  // that take turns, so that their caches are cold

/// Tensors on the device whose memory lives as long as this.
class Tensors {
 public:
  explicit Tensors(Bench& bench) : bench_(bench) {}
  Tensor act(std::initializer_list<int64_t> shape) { return filled(Dtype::bf16, shape); }
  Tensor filled(Dtype dtype, std::initializer_list<int64_t> shape) {
    const size_t bytes = Tensor::of(nullptr, dtype, shape).bytes();
    memory_.push_back(bench_.filled((bytes + 15) / 16 * 16));
    return memory_.back().view(dtype, shape);
  }
  Tensor zeros(Dtype dtype, std::initializer_list<int64_t> shape) {
    memory_.push_back(bench_.ops().allocate(Tensor::of(nullptr, dtype, shape).bytes(), Place::device));
    return memory_.back().view(dtype, shape);
  }
  Tensor constant(float value, std::initializer_list<int64_t> shape) {
    const int64_t n = Tensor::of(nullptr, Dtype::f32, shape).elements();
    memory_.push_back(bench_.upload(std::vector<float>(static_cast<size_t>(n), value)));
    return memory_.back().view(Dtype::f32, shape);
  }
  /// Bytes that are finite as fp8 and as f32.
  Tensor codes(std::initializer_list<int64_t> shape) {
    const size_t n = static_cast<size_t>(Tensor::of(nullptr, Dtype::u8, shape).elements());
    std::mt19937 random(3);
    std::vector<uint32_t> words((n + 3) / 4);
    for (uint32_t& w : words) w = 0x30000000U | (static_cast<uint32_t>(random()) & 0x8fbfbfbfU);
    memory_.push_back(bench_.upload(words));
    return memory_.back().view(Dtype::u8, shape);
  }
  Tensor ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
    memory_.push_back(bench_.upload(values));
    return memory_.back().view(Dtype::i32, shape);
  }
  static Weight weight(const Tensor& t, int64_t out, int64_t in) {
    Weight w;
    w.format = t.dtype == Dtype::f32 ? WeightFormat::f32 : WeightFormat::bf16;
    w.out = out;
    w.in = in;
    w.codes = t;
    return w;
  }

 private:
  Bench& bench_;
  std::vector<Buffer> memory_;
};

/// A window of `rows` rows of one sequence at `position`, or a piece of a prompt.
struct World {
  Caches caches;
  Batch batch;

  World(Tensors& t, int64_t rows, int64_t position, bool window) {
    CacheGeometry& g = caches.geometry;
    g.mla_layers = kLayers;
    g.kda_layers = kLayers;
    g.kpool = kPool;
    g.latent = kLatent;
    g.index_dim = kIndexDim;
    g.kda_heads = kHeads;
    g.head_dim = kKdaDim;
    g.conv_channels = 3 * kHeads * kKdaDim;
    g.format = KvFormat::fp8_c528;
    caches.layout = block_layout(g);
    const int64_t blocks = (position + rows + kBlockTokens - 1) / kBlockTokens + 1;
    caches.blocks = t.codes({blocks, static_cast<int64_t>(caches.layout.block_bytes)});
    caches.state = t.zeros(Dtype::f32, {1, kLayers, kHeads, kKdaDim * kKdaDim});
    caches.conv = t.zeros(Dtype::bf16, {1, kLayers, g.conv_columns(), g.conv_channels});
    caches.records = t.zeros(Dtype::f32, {1, kLayers, g.max_window, g.record_width()});
    caches.ring = t.zeros(Dtype::bf16, {1, kLayers, g.ring(), 2 * kIndexDim});
    std::vector<int32_t> positions, table;
    for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(position + r));
    for (int64_t b = 1; b < blocks; ++b) table.push_back(static_cast<int32_t>(b));
    batch.rows = static_cast<int>(rows);
    batch.seqs = 1;
    batch.window_rows = window ? batch.rows : 0;
    batch.window_seqs = window ? 1 : 0;
    batch.position = t.ints(positions, {rows});
    batch.token = t.ints(std::vector<int32_t>(static_cast<size_t>(rows), 1), {rows});
    batch.row_seq = t.ints(std::vector<int32_t>(static_cast<size_t>(rows), 0), {rows});
    batch.row_begin = t.ints({0, batch.rows}, {2});
    batch.slot = t.ints({0}, {1});
    batch.committed = t.ints({static_cast<int32_t>(position)}, {1});
    batch.replay = t.ints({0}, {1});
    batch.block_table = t.ints(table, {1, blocks - 1});
    batch.export_pos = t.ints({-1, -1}, {1, 2});
    batch.export_snap = t.ints({-1, -1}, {1, 2});
  }
};

void report(Bench& bench, const std::string& op, const std::string& shape, int64_t rows, double bytes,
            const std::function<void(int)>& call) {
  if (bench.wanted(op)) bench.add({op, shape, rows, bench.time(16, call), bytes, 0, 0});
}

void row_ops(Bench& bench, int64_t rows) {
  Tensors t(bench);
  Ops& ops = bench.ops();
  constexpr int64_t kMix = (2 + kStreams) * kStreams;
  const Weight fn = Tensors::weight(t.filled(Dtype::bf16, {kMix, kStreams * kHidden}), kMix, kStreams * kHidden);
  const Weight base = Tensors::weight(t.constant(0.1F, {kMix}), kMix, 1);
  const Weight scale = Tensors::weight(t.constant(0.1F, {3}), 3, 1);
  const Weight norm = Tensors::weight(t.act({kHidden}), kHidden, 1);
  const Tensor streams = t.act({rows, kStreams, kHidden}), y = t.act({rows, kHidden});
  const Tensor post = t.constant(0.2F, {rows, kStreams}), comb = t.constant(0.2F, {rows, kStreams, kStreams});
  const auto values = static_cast<double>(rows * kHidden * 2);
  const MhcPreArgs pre{.streams = streams,
                       .site = {&fn, &base, &scale},
                       .norm = &norm,
                       .rms_eps = 1e-6F,
                       .hc_eps = 1e-6F,
                       .sinkhorn = 20,
                       .post = post,
                       .comb = comb,
                       .u = t.act({rows, kHidden})};
  report(bench, "mhc_post_pre", "4 x 4096", rows, values * (2 * kStreams + 2) + 2.0 * kMix * kStreams * kHidden,
         [&](int) {
           ops.mhc_post_pre({{streams, y, post, comb}, pre});
         });
  report(bench, "rms_norm", "4096", rows, 2 * values, [&](int) { ops.rms_norm({y, &norm, 1e-6F, y}); });
  const Weight gate = Tensors::weight(t.act({kExperts, kHidden}), kExperts, kHidden);
  const Weight bias = Tensors::weight(t.constant(0.0F, {kExperts}), kExperts, 1);
  RouterArgs router{};
  router.x = y;
  router.w = &gate;
  router.bias = &bias;
  router.groups = router.top_groups = 1;
  router.k = 8;
  router.normalize = true;
  router.scale = 1;
  router.real_rows = static_cast<int>(rows);
  router.index = t.zeros(Dtype::i32, {rows, 8});
  router.weight = t.zeros(Dtype::f32, {rows, 8});
  report(bench, "router", "288 x 4096", rows, values + 2.0 * kExperts * kHidden, [&](int) { ops.router(router); });
  const Tensor wide = t.act({rows, kHeads * kKdaDim}), gates = t.act({rows, kHeads * kKdaDim});
  const Weight head_norm = Tensors::weight(t.act({kKdaDim}), kKdaDim, 1);
  report(bench, "gated_norm", "32 x 128", rows, 3 * values, [&](int) {
    ops.gated_norm({wide, gates, &head_norm, 1e-6F, static_cast<int>(kKdaDim), wide});
  });
}

void kda_ops(Bench& bench, int64_t rows, bool window) {
  Tensors t(bench);
  Ops& ops = bench.ops();
  World world(t, rows, window ? 4096 : 0, window);
  constexpr int64_t kWidth = kHeads * kKdaDim;
  const Tensor raw = t.act({rows, 3 * kWidth}), qkv = t.act({rows, 3 * kWidth}), out = t.act({rows, kWidth});
  const Weight conv = Tensors::weight(t.act({3 * kWidth, 4}), 3 * kWidth, 4);
  const Weight a_log = Tensors::weight(t.constant(0.0F, {kHeads}), kHeads, 1);
  const Weight dt_bias = Tensors::weight(t.constant(0.0F, {kWidth}), kWidth, 1);
  const auto values = static_cast<double>(rows * kWidth * 2);
  report(bench, "kda_conv", "12288", rows, 6 * values, [&](int i) {
    ops.kda_conv({&world.batch, i % kLayers, &world.caches, raw, &conv, qkv});
  });
  KdaArgs args{.batch = &world.batch,
               .layer = 0,
               .caches = &world.caches,
               .q = qkv.columns(0, kWidth),
               .k = qkv.columns(kWidth, 2 * kWidth),
               .v = qkv.columns(2 * kWidth, 3 * kWidth),
               .gate = t.act({rows, kWidth}),
               .beta = t.act({rows, kHeads}),
               .a_log = &a_log,
               .dt_bias = &dt_bias,
               .lower_bound = -5,
               .out = out};
  report(bench, window ? "kda_window" : "kda_chunk", "32 heads", rows,
         5 * values + 4.0 * kHeads * kKdaDim * kKdaDim * 2, [&](int i) {
           KdaArgs call = args;
           call.layer = i % kLayers;
           window ? ops.kda_window(call) : ops.kda_chunk(call);
         });
}

void mla_ops(Bench& bench, int64_t rows, int64_t position, bool window) {
  Tensors t(bench);
  Ops& ops = bench.ops();
  World world(t, rows, position, window);
  const std::string shape = cat("at ", position / 1024, "k");
  const Weight kv_b = Tensors::weight(t.act({kHeads * (kNope + kValue), kLatent}), kHeads * (kNope + kValue), kLatent);
  const Tensor q = t.act({rows, kHeads * kNope}), q_latent = t.act({rows, kHeads * kLatent});
  const Tensor a = t.act({rows, kHeads * kLatent}), expanded = t.act({rows, kHeads * kValue});
  const int window_rows = world.batch.window_rows;
  const auto pools = static_cast<int64_t>(position / kPool);
  std::vector<int32_t> selected;
  const int64_t n = std::min(pools, kTopPools);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < kTopPools; ++i) selected.push_back(static_cast<int32_t>(i < n ? i * pools / n : 0));
  }
  const Tensor chosen = t.ints(selected, {rows, kTopPools});
  const Tensor count = t.ints(std::vector<int32_t>(static_cast<size_t>(rows), static_cast<int32_t>(n)), {rows});
  const double weights = kHeads * static_cast<double>(kNope * kLatent) * 2;
  report(bench, "mla_absorb", shape, rows, weights, [&](int) {
    ops.mla_absorb(
        {q, &kv_b, static_cast<int>(kHeads), static_cast<int>(kNope), static_cast<int>(kValue), q_latent, window_rows});
  });
  report(bench, "mla_sparse", shape, rows, static_cast<double>(rows * n * kPool * 528), [&](int i) {
    ops.mla_sparse(
        {&world.batch, i % kLayers, &world.caches, q_latent, chosen, count, static_cast<int>(kHeads), 0.06F, a});
  });
  report(bench, "mla_expand", shape, rows, weights, [&](int) {
    ops.mla_expand(
        {a, &kv_b, static_cast<int>(kHeads), static_cast<int>(kNope), static_cast<int>(kValue), expanded, window_rows});
  });
  const Tensor query = t.act({rows, kIndexHeads * kIndexDim});
  const Tensor head_weight = t.constant(0.1F, {rows, kIndexHeads});
  const Tensor result = t.zeros(Dtype::i32, {rows, kTopPools}), found = t.zeros(Dtype::i32, {rows});
  report(bench, "index_select", shape, rows, static_cast<double>(pools * (kIndexDim + 4)), [&](int i) {
    ops.index_select({&world.batch,
                      i % kLayers,
                      &world.caches,
                      query,
                      head_weight,
                      static_cast<int>(kIndexHeads),
                      static_cast<int>(kTopPools),
                      result,
                      found,
                      {}});
  });
}

}  // namespace

void bench_step_ops(Bench& bench) {
  for (const int64_t rows : {1, 8, 2048}) row_ops(bench, rows);
  for (const int64_t rows : {1, 8}) kda_ops(bench, rows, true);
  kda_ops(bench, 2048, false);
  for (const int64_t rows : {1, 8}) {
    for (const int64_t position : {int64_t{4} << 10, int64_t{128} << 10, int64_t{1} << 20}) {
      mla_ops(bench, rows, position - 16, true);
    }
  }
  mla_ops(bench, 512, int64_t{32} << 10, false);
}

}  // namespace glm53
