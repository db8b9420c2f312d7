// DFlash2 against an independent plain implementation of its specification (dflash_oracle.h), on random small drafters:
// numbers in every length of context, mistakes that must show, and what a draft must not depend on, to the bit.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <tuple>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"
#include "engine/draft/dflash.h"
#include "tests/golden/dflash_oracle.h"
#include "tests/golden/draft_harness.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53::golden {
namespace {

using oracle::Mistake;
using oracle::Shape;

/// fp32 against fp64, relative to the largest value.
constexpr double kTolerance = 2e-5;

/// As much of a target as a drafter sees.
class FakeTarget final : public Model {
 public:
  FakeTarget(const Shape& shape, std::vector<float>& embedding, std::vector<float>& head) {
    config_.vocab = shape.vocab;
    config_.hidden = shape.hidden;
    config_.layers = 4 * shape.taps;
    limits_.max_rows = 256;
    limits_.max_seqs = 3;
    for (int i = 0; i < shape.taps; ++i) limits_.taps.push_back(4 * i + 1);
    const auto weight = [&](std::vector<float>& v) {
      Weight w;
      w.format = WeightFormat::f32;
      w.out = shape.vocab;
      w.in = shape.hidden;
      w.codes = Tensor::of(v.data(), Dtype::f32, {w.out, w.in});
      return w;
    };
    embedding_ = weight(embedding);
    head_ = weight(head);
  }
  const ModelConfig& config() const override { return config_; }
  const ModelLimits& limits() const override { return limits_; }
  CacheGeometry geometry() const override { return {}; }
  SharedWeights shared() const override {
    ShardPlan whole;
    whole.vocab = config_.vocab;
    return {&embedding_, &head_, whole};
  }
  std::vector<std::pair<std::string, size_t>> weight_bytes() const override { return {}; }
  ForwardOut forward(const Batch&, const Caches&) override { throw Error(Code::internal, "no forward here"); }
  ForwardOut forward_part(const Batch&, const Caches&, LayerSpan) override {
    throw Error(Code::internal, "no forward here");
  }
  void flush(std::span<const SlotId>, std::span<const int>, const Caches&) override {}
  void set_probe(Probe) override {}

 private:
  ModelConfig config_;
  ModelLimits limits_;
  Weight embedding_, head_;
};

/// A random drafter in a folder, beside the same for the oracle.
struct World {
  Shape shape;
  oracle::Tensors tensors;
  std::vector<float> embedding, head;
  testing::TempDir dir;
  std::mt19937 random;
  std::unique_ptr<Ops> ops = make_cpu_ops(2);
  std::unique_ptr<Communicator> comm = make_single_communicator();
  std::unique_ptr<FakeTarget> target;
  std::unique_ptr<Drafter> drafter;

  explicit World(const Shape& s, uint32_t seed) : shape(s), random(seed) {
    write();
    embedding = normals(s.vocab * s.hidden, 0.02F);
    head = normals(s.vocab * s.hidden, 0.3F);
    tensors.embedding.assign(embedding.begin(), embedding.end());
    tensors.head.assign(head.begin(), head.end());
    target = std::make_unique<FakeTarget>(s, embedding, head);
    drafter = make_dflash_drafter(dir.path(), FormatPolicy::as_stored(), *target, *ops, *comm);
    drafter->make_pools({2, 4, 4});
  }

  std::vector<float> normals(int64_t n, float scale, float mean = 0) {
    std::normal_distribution<float> normal(mean, scale);
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = normal(random);
    return v;
  }
  int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }
  /// Taps of n positions.
  std::vector<float> taps(int n) { return normals(int64_t{n} * shape.taps * shape.hidden, 1); }
  FedPiece piece(int slot, int from, int to, const std::vector<float>& all, Regime regime = Regime::chunk) const {
    const auto width = static_cast<ptrdiff_t>(shape.taps) * shape.hidden;
    return {slot,
            from,
            std::vector<int32_t>(static_cast<size_t>(to - from), 1),
            {all.begin() + from * width, all.begin() + to * width},
            regime};
  }
  oracle::Context context(int from, int to, const std::vector<float>& all) const {
    const auto width = static_cast<ptrdiff_t>(shape.taps) * shape.hidden;
    oracle::Context c{from, {}};
    for (int t = from; t < to; ++t) c.taps.emplace_back(all.begin() + t * width, all.begin() + (t + 1) * width);
    return c;
  }
  void feed(const std::vector<FedPiece>& pieces) { Feeder(*ops).feed(*drafter, pieces, true); }
  /// All of [from, to) in pieces of random length and regime.
  void feed_all(int slot, int from, int to, const std::vector<float>& all) {
    while (from < to) {
      const bool window = between(0, 1) == 0;
      const int end = std::min(to, from + between(1, window ? 8 : 90));
      feed({piece(slot, from, end, all, window ? Regime::window : Regime::chunk)});
      from = end;
    }
  }
  struct Seen {
    Draft draft;
    Values z, unary, candidates, scores;
  };
  Seen propose(int slot, int anchor, int position) {
    const DraftWatch watch(*drafter, *ops);
    const std::vector<DraftRequest> requests{{SlotId{slot}, anchor, position, shape.block - 1, {}}};
    std::vector<Draft> drafts(1);
    drafter->propose(requests, drafts);
    drafter->set_probe({});
    return {drafts[0], watch["z"], watch["unary"], watch["candidates"], watch["scores"]};
  }

 private:
  void add(testing::NewTensors& file, const std::string& name, const std::vector<int64_t>& dims, float scale,
           float mean = 0) {
    const std::vector<float> values = normals(testing::elements(dims), scale, mean);
    file[name] = {"F32", dims,
                  std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))};
    tensors.of[name].assign(values.begin(), values.end());
  }
  /// A matrix that keeps the size of what it is given.
  void matrix(testing::NewTensors& file, const std::string& name, int64_t out, int64_t in, float size = 1) {
    add(file, name, {out, in}, size / std::sqrt(static_cast<float>(in)));
  }
  void write() {
    const Shape& s = shape;
    const int64_t h = s.hidden, q = int64_t{s.heads} * s.dim, kv = int64_t{s.kv_heads} * s.dim;
    testing::NewTensors file;
    matrix(file, "fc.weight", h, s.taps * h);
    add(file, "hidden_norm.weight", {h}, 0.2F, 1);
    add(file, "norm.weight", {h}, 0.2F, 1);
    matrix(file, "candidate_selector.hidden_projection.weight", s.rank, h);
    add(file, "candidate_selector.predecessor_codebook", {s.vocab, s.rank}, 1);
    add(file, "candidate_selector.successor_codebook", {s.vocab, s.rank}, 1);
    for (int i = 0; i < s.layers; ++i) {
      const std::string l = cat("layers.", i, ".");
      for (const char* norm : {"input_layernorm.weight", "post_attention_layernorm.weight"})
        add(file, l + norm, {h}, 0.2F, 1);
      matrix(file, l + "self_attn.q_proj.weight", q, h, 2);
      matrix(file, l + "self_attn.k_proj.weight", kv, h, 2);
      matrix(file, l + "self_attn.v_proj.weight", kv, h);
      matrix(file, l + "self_attn.o_proj.weight", h, q);
      for (const char* norm : {"q", "k"}) add(file, cat(l, "self_attn.", norm, "_norm.weight"), {s.dim}, 0.3F, 1.5F);
      matrix(file, l + "mlp.gate_proj.weight", s.mlp, h, 2);
      matrix(file, l + "mlp.up_proj.weight", s.mlp, h);
      matrix(file, l + "mlp.down_proj.weight", h, s.mlp);
      for (const char* conv : {"attention_conv", "mlp_conv"}) {
        add(file, cat(l, conv, ".base_kernel"), {2, s.kernel, h}, 0.3F, 0.5F);
        matrix(file, cat(l, conv, ".kernel_projection.weight"), 2 * s.kernel * (h / s.group), h, 0.3F);
      }
    }
    testing::write_text(dir / "model.safetensors", testing::file_of(file));
    nlohmann::json taps = nlohmann::json::array();
    for (int i = 0; i < s.taps; ++i) taps.push_back(4 * i + 1);
    const nlohmann::json config = {
        {"architectures", {"DFlash2DraftModel"}},
        {"attention_bias", false},
        {"hidden_act", "silu"},
        {"hidden_size", s.hidden},
        {"intermediate_size", s.mlp},
        {"is_causal", false},
        {"head_dim", s.dim},
        {"layer_types", std::vector<std::string>(static_cast<size_t>(s.layers), "sliding_attention")},
        {"num_attention_heads", s.heads},
        {"num_hidden_layers", s.layers},
        {"num_key_value_heads", s.kv_heads},
        {"num_target_layers", 4 * s.taps},
        {"rms_norm_eps", s.eps},
        {"rope_parameters", {{"rope_theta", s.theta}, {"rope_type", "default"}}},
        {"sliding_window", s.window},
        {"use_sliding_window", true},
        {"vocab_size", s.vocab},
        {"dflash_config",
         {{"block_size", s.block},
          {"conv_group_size", s.group},
          {"conv_kernel_size", s.kernel},
          {"mask_token_id", s.mask},
          {"selector_rank", s.rank},
          {"selector_top_k", s.top_k},
          {"target_layer_ids", taps}}}};
    testing::write_text(dir / "config.json", config.dump());
  }
};

std::vector<Shape> shapes() {
  Shape a{
      .hidden = 32, .layers = 2, .heads = 4, .kv_heads = 2, .dim = 8, .mlp = 48, .block = 8, .window = 12, .taps = 3};
  a.kernel = 2, a.group = 4, a.rank = 5, a.top_k = 6, a.vocab = 64, a.mask = 63;
  Shape b{
      .hidden = 24, .layers = 1, .heads = 3, .kv_heads = 3, .dim = 6, .mlp = 20, .block = 4, .window = 5, .taps = 2};
  b.kernel = 3, b.group = 3, b.rank = 7, b.top_k = 4, b.vocab = 50, b.mask = 0;
  Shape c{
      .hidden = 16, .layers = 3, .heads = 4, .kv_heads = 1, .dim = 4, .mlp = 40, .block = 6, .window = 70, .taps = 5};
  c.kernel = 1, c.group = 16, c.rank = 2, c.top_k = 9, c.vocab = 30, c.mask = 7, c.theta = 500;
  return {a, b, c};
}

/// Largest difference of a table of the drafter and one of the oracle, by the oracle's largest value.
double difference(const Values& got, const oracle::Rows& want) {
  double largest = 0, worst = 0;
  size_t at = 0;
  for (const oracle::Row& row : want) {
    for (const double w : row) {
      largest = std::max(largest, std::fabs(w));
      worst = std::max(worst, std::fabs(static_cast<double>(got.data.at(at++)) - w));
    }
  }
  REQUIRE(at == got.data.size());
  return worst / largest;
}

TEST_CASE("dflash2 and the oracle: contexts of every length, random cuts, the ring's wrap") {
  uint32_t seed = 100;
  for (const Shape& shape : shapes()) {
    World world(shape, ++seed);
    const int w = shape.window;
    double worst = 0;
    // The ring holds 64 or 128 positions: the longest contexts go round it several times.
    for (const int n : {0, 1, 2, w - 1, w, w + 1, w + shape.block, 63, 64, 65, 127, 128, 129, 300}) {
      CAPTURE(n);
      const std::vector<float> taps = world.taps(n);
      world.drafter->reset(SlotId{1});
      world.feed_all(1, 0, n, taps);
      const int anchor = world.between(0, shape.vocab - 1);
      const World::Seen got = world.propose(1, anchor, n);
      const oracle::Block want = oracle::draft(shape, world.tensors, world.context(0, n, taps), anchor, n);
      for (const double d :
           {difference(got.z, want.z), difference(got.unary, want.unary), difference(got.scores, want.score)}) {
        CHECK(d < kTolerance);
        worst = std::max(worst, d);
      }
      CHECK(std::equal(got.draft.tokens.begin(), got.draft.tokens.end(), want.draft.begin(), want.draft.end()));
      for (size_t i = 0; i < want.ids.size(); ++i)
        for (size_t c = 0; c < want.ids[i].size(); ++c)
          CHECK(static_cast<int>(got.candidates.row(static_cast<int64_t>(i))[c]) == want.ids[i][c]);
    }
    MESSAGE("largest difference " << worst);
  }
}

TEST_CASE("dflash2: every mistake of the specification's list would show") {
  const Shape shape = shapes()[0];
  World world(shape, 7);
  const int n = 50;
  const std::vector<float> taps = world.taps(n);
  world.drafter->reset(SlotId{0});
  world.feed_all(0, 0, n, taps);
  const World::Seen got = world.propose(0, 3, n);
  for (const Mistake m :
       {Mistake::causal_block, Mistake::block_outside, Mistake::wide_window, Mistake::narrow_window,
        Mistake::shifted_positions, Mistake::anchor_feature, Mistake::taps_swapped, Mistake::conv_across_rows,
        Mistake::conv_sides_swapped, Mistake::conv_of_output, Mistake::eps, Mistake::theta, Mistake::interleaved_rope,
        Mistake::norm_plus_one, Mistake::codebooks_swapped, Mistake::clamped_swiglu}) {
    CAPTURE(static_cast<int>(m));
    const oracle::Block wrong = oracle::draft(shape, world.tensors, world.context(0, n, taps), 3, n, m);
    if (m == Mistake::codebooks_swapped)
      CHECK(difference(got.scores, wrong.score) > 50 * kTolerance);
    else
      CHECK(difference(got.z, wrong.z) > 50 * kTolerance);
  }
}

TEST_CASE("dflash2: what a draft sees, to the bit") {
  const Shape shape = shapes()[0];
  World world(shape, 8);
  const int n = 40, w = shape.window, width = shape.taps * shape.hidden;
  const std::vector<float> taps = world.taps(n + 8);
  world.drafter->reset(SlotId{0});
  world.feed_all(0, 0, n, taps);
  const World::Seen plain = world.propose(0, 3, n);
  const auto row = [&](const World::Seen& s, int i) { return s.z.part(i, i + 1); };
  const auto with_changed = [&](int position) {
    std::vector<float> changed = taps;
    for (int i = 0; i < width; ++i) changed[static_cast<size_t>(position * width + i)] += 0.5F;
    world.drafter->reset(SlotId{2});
    world.feed({world.piece(2, 0, n, changed)});
    return world.propose(2, 3, n);
  };
  SUBCASE("positions out of the window change nothing, those in it do") {
    for (const int t : {0, n - w - 1, n - w}) CHECK(same_bits(with_changed(t).z, plain.z));
    // The oldest visible one is seen by the anchor's row alone, and by the others through it in the second layer.
    CHECK_FALSE(same_bits(row(with_changed(n - w + 1), 0), row(plain, 0)));
    for (int i = 0; i < shape.block; ++i) {
      CHECK_FALSE(same_bits(row(with_changed(n - w + shape.block), i), row(plain, i)));
      CHECK_FALSE(same_bits(row(with_changed(n - 1), i), row(plain, i)));
    }
  }
  SUBCASE("one layer: the window of each row by itself") {
    Shape flat = shape;
    flat.layers = 1;
    flat.kernel = 1;  // no row sees another one's window through the convolution
    World one(flat, 9);
    const std::vector<float> given = one.taps(n);
    one.feed({one.piece(0, 0, n, given)});
    const World::Seen before = one.propose(0, 3, n);
    for (int t = n - w - 1; t < n; ++t) {
      std::vector<float> changed = given;
      for (int i = 0; i < width; ++i) changed[static_cast<size_t>(t * width + i)] += 0.5F;
      one.drafter->reset(SlotId{1});
      one.feed({one.piece(1, 0, n, changed)});
      const World::Seen after = one.propose(1, 3, n);
      for (int i = 0; i < flat.block; ++i) {
        CAPTURE(t);
        CAPTURE(i);
        CHECK(same_bits(row(before, i), row(after, i)) == (n + i - t > w - 1));
      }
    }
  }
  SUBCASE("rejected rows are not seen, and their places are taken again") {
    world.feed({world.piece(0, n, n + 8, taps, Regime::window)});
    CHECK(same_bits(world.propose(0, 3, n).z, plain.z));
    const std::vector<float> others = world.taps(n + 8);
    world.drafter->reset(SlotId{1});
    world.feed({world.piece(1, 0, n - 5, taps)});
    world.feed({world.piece(1, n - 5, n + 3, others, Regime::window)});
    world.feed({world.piece(1, n - 5, n, taps, Regime::window)});
    CHECK(same_bits(world.propose(1, 3, n).z, plain.z));
  }
  SUBCASE("the anchor and later blocks leave nothing behind") {
    world.propose(0, 9, n);
    world.propose(0, 5, n - 3);
    CHECK(same_bits(world.propose(0, 3, n).z, plain.z));
  }
}

TEST_CASE("dflash2: snapshots, exports, gaps and invalid context") {
  const Shape shape = shapes()[0];
  World world(shape, 10);
  const int n = 200, snap_at = 150;
  const std::vector<float> taps = world.taps(n);
  world.drafter->reset(SlotId{0});
  world.feed_all(0, 0, snap_at, taps);
  const World::Seen plain = world.propose(0, 3, snap_at);
  world.drafter->save(SlotId{0}, snap_at, SnapId{1});
  // Exports out of the middle of a piece that is longer than the ring, and at its borders.
  FedPiece piece = world.piece(2, 40, n, taps);
  world.drafter->reset(SlotId{2});
  world.feed({world.piece(2, 0, 40, taps)});
  piece.exports = {{60, 0}, {snap_at, 2}};
  world.feed({piece});
  for (const auto& [snap, position] : {std::pair{1, snap_at}, {2, snap_at}, {0, 60}}) {
    world.drafter->restore(SnapId{snap}, SlotId{3}, position);
    world.feed_all(3, position, snap_at, taps);
    const World::Seen again = world.propose(3, 3, snap_at);
    CHECK(same_bits(again.z, plain.z));
    CHECK(again.draft.tokens == plain.draft.tokens);
  }
  // Without stored context: nothing before the position is seen, and what follows is.
  const auto expect_from = [&](int from) {
    const World::Seen got = world.propose(3, 3, snap_at);
    const oracle::Block want = oracle::draft(shape, world.tensors, world.context(from, snap_at, taps), 3, snap_at);
    CHECK(difference(got.z, want.z) < kTolerance);
  };
  world.drafter->invalidate(SlotId{3}, snap_at - 4);
  world.feed({world.piece(3, snap_at - 4, snap_at, taps)});
  expect_from(snap_at - 4);
  world.drafter->invalidate(SlotId{3}, snap_at);
  expect_from(snap_at);
  world.drafter->restore(SnapId{3}, SlotId{3}, snap_at);  // never saved
  expect_from(snap_at);
  world.drafter->restore(SnapId{1}, SlotId{3}, snap_at - 1);  // of another position
  world.feed({world.piece(3, snap_at - 1, snap_at, taps)});
  expect_from(snap_at - 1);
  world.drafter->forget(SnapId{1});
  world.drafter->restore(SnapId{1}, SlotId{3}, snap_at);
  expect_from(snap_at);
  // A pass that does not go on where the last one ended: the context begins anew there.
  world.drafter->reset(SlotId{3});
  world.feed({world.piece(3, 0, snap_at - 10, taps)});
  world.feed({world.piece(3, snap_at - 6, snap_at, taps)});
  expect_from(snap_at - 6);
}

/// What parse_dflash_config(), or then check_dflash_fits(), says of a config with one member changed; empty if nothing.
std::string verdict(const World& world, const std::string& pointer, const nlohmann::json& value) {
  std::ifstream in(world.dir / "config.json");
  nlohmann::json json = nlohmann::json::parse(in);
  const nlohmann::json::json_pointer at(pointer);
  if (value.is_null())
    json.at(at.parent_pointer()).erase(at.back());
  else
    json[at] = value;
  try {
    check_dflash_fits(parse_dflash_config(json.dump(), "config.json"), world.target->config());
    return {};
  } catch (const Error& e) {
    CHECK(e.code() == Code::config);
    return cat(e.what(), " | ", e.remedy());
  }
}

TEST_CASE("dflash2: a config that is not for this target, or not of a drafter, is refused with the reason") {
  const World world(shapes()[0], 12);
  CHECK(verdict(world, "/vocab_size", 64).empty());
  const std::tuple<const char*, nlohmann::json, const char*> wrong[] = {
      {"/hidden_size", 48, "hidden_size is 48, the target's hidden_size is 32"},
      {"/vocab_size", 65, "vocab_size is 65, the target's vocab_size is 64"},
      {"/num_target_layers", 13, "num_target_layers is 13, the target's num_hidden_layers is 12"},
      {"/dflash_config/target_layer_ids", {1, 5, 12}, "layers are numbered 0 to num_target_layers"},
      {"/dflash_config/mask_token_id", 64, "mask_token_id"},
      {"/dflash_config/block_size", 17, "block_size"},
      {"/dflash_config/conv_group_size", 5, "must divide hidden_size = 32"},
      {"/dflash_config/sample_from_anchor", true, "sample_from_anchor"},
      {"/output_multiplier", 0.5, "output_multiplier"},
      {"/is_causal", true, "is_causal"},
      {"/use_sliding_window", false, "use_sliding_window"},
      {"/sliding_window", nullptr, "sliding_window is missing"},
      {"/layer_types", {"sliding_attention", "full_attention"}, "only sliding_attention"},
      {"/layer_types", {"sliding_attention"}, "expected num_hidden_layers = 2"},
      {"/rope_parameters", nullptr, "rope_parameters is missing"},
      {"/rope_parameters/rope_theta", nullptr, "rope_theta is missing"},
      {"/rope_parameters/rope_type", "yarn", "rope_type"},
      {"/rms_norm_eps", nullptr, "rms_norm_eps is missing"},
      {"/num_key_value_heads", 3, "must divide num_attention_heads = 4"},
      {"/architectures", {"Qwen3ForCausalLM"}, "must be a DFlash2DraftModel"},
      {"/hidden_act", "gelu", "hidden_act"},
  };
  for (const auto& [pointer, value, said] : wrong) {
    CAPTURE(pointer);
    CHECK_MESSAGE(verdict(world, pointer, value).find(said) != std::string::npos, verdict(world, pointer, value));
  }
}

TEST_CASE("dflash2: what is refused, with the reason") {
  World world(shapes()[0], 11);
  const std::vector<DraftRequest> much{{SlotId{0}, 1, 5, 8, {}}}, nowhere{{SlotId{9}, 1, 5, 7, {}}};
  std::vector<Draft> one(1), two(2);
  CHECK_THROWS_AS(world.drafter->propose(much, one), Error);
  CHECK_THROWS_WITH(world.drafter->propose(nowhere, one), doctest::Contains("slot 9"));
  CHECK_THROWS_AS(world.drafter->propose(nowhere, two), Error);
  CHECK_THROWS_AS(world.drafter->reset(SlotId{4}), Error);
  CHECK_THROWS_AS(world.drafter->save(SlotId{0}, 0, SnapId{4}), Error);
  const auto unpooled =
      make_dflash_drafter(world.dir.path(), FormatPolicy::as_stored(), *world.target, *world.ops, *world.comm);
  CHECK_THROWS_AS(unpooled->reset(SlotId{0}), Error);
}

}  // namespace
}  // namespace glm53::golden
