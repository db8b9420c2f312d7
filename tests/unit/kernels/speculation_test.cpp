// Windows of drafts with any number accepted leave exactly what a run without drafts leaves.
#include "kda_world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

constexpr int kHeads = 2, kDim = 16, kWidth = kHeads * kDim, kLatent = 128, kIndexDim = 128, kLayers = 2;

CacheGeometry geometry(int kpool, KvFormat format) {
  CacheGeometry g = kda_geometry(kHeads, kDim, kLayers);
  g.mla_layers = 1;
  g.kpool = kpool;
  g.latent = kLatent;
  g.index_dim = kIndexDim;
  g.format = format;
  return g;
}

// What the layers around the operators would compute for one token; a rejected draft gets other values.
struct Token {
  Floats raw, gate, beta, latent, key, index_gate;
  explicit Token(uint32_t seed) {
    Random random(seed);
    raw = random.normals(3 * kWidth);
    gate = random.normals(kWidth);
    beta = random.normals(kHeads);
    latent = random.normals(kLatent);
    key = random.normals(kIndexDim);
    index_gate = random.normals(kIndexDim);
  }
};

struct Weights {
  explicit Weights(int kpool) {
    Random random(31);
    conv = random.normals(3 * kWidth * 4, 0.5F);
    a_log = random.normals(kHeads, 0.5F);
    dt_bias = random.normals(kWidth);
    norm = random.normals(kIndexDim, 0.1F, 1.0F);
    bias = random.normals(kIndexDim, 0.1F);
    ape = random.normals(int64_t{kpool} * kIndexDim);
    conv_w = plain(conv, 3 * kWidth, 4);
    a_log_w = plain(a_log, kHeads, 1);
    dt_bias_w = plain(dt_bias, kWidth, 1);
    norm_w = plain(norm, kIndexDim, 1);
    bias_w = plain(bias, kIndexDim, 1);
    ape_w = plain(ape, kpool, kIndexDim);
  }
  Floats conv, a_log, dt_bias, norm, bias, ape;
  Weight conv_w, a_log_w, dt_bias_w, norm_w, bias_w, ape_w;
};

// Runs a step of the given tokens through every operator that writes a cache; returns the outputs of each row.
std::vector<Floats> run(Ops& ops, World& world, Weights& w, Step& step, const std::vector<Token>& tokens) {
  const int64_t R = step.rows;
  const auto gather = [&](Floats Token::*member, int64_t n) {
    Floats all(at(R * n), NAN);
    for (size_t i = 0; i < tokens.size(); ++i)
      std::copy_n((tokens[i].*member).begin(), n, all.begin() + int64_t(i) * n);
    return all;
  };
  Floats raw = gather(&Token::raw, 3 * kWidth), gate = gather(&Token::gate, kWidth),
         beta = gather(&Token::beta, kHeads);
  Floats latent = gather(&Token::latent, kLatent), key = gather(&Token::key, kIndexDim);
  Floats index_gate = gather(&Token::index_gate, kIndexDim);
  std::vector<Floats> outputs(at(R));
  for (int layer = 0; layer < kLayers; ++layer) {
    Floats qkv(at(R * 3 * kWidth), NAN), out(at(R * kWidth), NAN);
    const Tensor conv = tensor(qkv, {R, 3 * kWidth});
    ops.kda_conv({&step.batch, layer, &world.caches, tensor(raw, {R, 3 * kWidth}), &w.conv_w, conv});
    ops.kda_window({&step.batch, layer, &world.caches, conv.columns(0, kWidth), conv.columns(kWidth, 2 * kWidth),
                    conv.columns(2 * kWidth, 3 * kWidth), tensor(gate, {R, kWidth}), tensor(beta, {R, kHeads}),
                    &w.a_log_w, &w.dt_bias_w, -5.0F, tensor(out, {R, kWidth})});
    for (size_t r = 0; r < at(R); ++r) {
      outputs[r].insert(outputs[r].end(), qkv.begin() + int64_t(r) * 3 * kWidth,
                        qkv.begin() + int64_t(r + 1) * 3 * kWidth);
      outputs[r].insert(outputs[r].end(), out.begin() + int64_t(r) * kWidth, out.begin() + int64_t(r + 1) * kWidth);
    }
  }
  ops.latent_write({&step.batch, 0, &world.caches, tensor(latent, {R, kLatent})});
  ops.index_write({&step.batch, 0, &world.caches, tensor(key, {R, kIndexDim}), tensor(index_gate, {R, kIndexDim}),
                   &w.norm_w, &w.bias_w, &w.ape_w});
  return outputs;
}

void flush(Ops& ops, World& world, Weights& w, std::span<const SlotId> slots, std::span<const int> replay) {
  const std::vector<const Weight*> a_log(kLayers, &w.a_log_w), dt_bias(kLayers, &w.dt_bias_w);
  ops.kda_flush({slots, replay, &world.caches, a_log, dt_bias, -5.0F});
}

void check_equal(World& a, World& b, int slot, const Ints& table, int tokens) {
  const CacheGeometry& g = a.caches.geometry;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = 0; h < kHeads; ++h) CHECK(same_bits(a.state(slot, layer, h), b.state(slot, layer, h)));
    CHECK(same_bits(a.history(slot, layer), b.history(slot, layer)));
  }
  // The ring's tokens that a later pool can still need; latents and pools of the accepted tokens.
  for (int p = std::max(0, tokens - g.kpool); p < tokens; ++p) CHECK(same_bits(a.ring(slot, 0, p), b.ring(slot, 0, p)));
  const BlockLayout& l = a.caches.layout;
  const auto same_part = [&](int block, size_t offset, size_t bytes) {
    const auto where = [&](World& w) {
      return static_cast<const std::byte*>(w.caches.blocks.data) + at(block) * l.block_bytes + offset;
    };
    return std::memcmp(where(a), where(b), bytes) == 0;
  };
  const size_t row = at(kLatent) * size_of(l.element), pool = at(kIndexDim) * size_of(l.element);
  const bool coded = size_of(l.element) == 1;
  for (int p = 0; p < tokens; ++p) {
    const int block = table[at(p / 64)];
    const size_t in_block = at(p % 64);
    CHECK(same_part(block, l.codes + in_block * row, row));
    if (coded) CHECK(same_part(block, l.scales + in_block * sizeof(float), sizeof(float)));
    if (p % g.kpool != g.kpool - 1) continue;
    CHECK(same_part(block, l.pool_keys + in_block / at(g.kpool) * pool, pool));
    if (coded) CHECK(same_part(block, l.pool_scales + in_block / at(g.kpool) * sizeof(float), sizeof(float)));
  }
}

}  // namespace

TEST_CASE("10,000 windows with random acceptance equal a run without drafts, bit for bit") {
  const auto ops = make_cpu_ops(2);
  constexpr int kTokens = 110, kWindows = 10000;
  const KvFormat formats[] = {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_c528, KvFormat::int8_c528};
  int steps = 0;
  for (uint32_t round = 0; steps < kWindows; ++round) {
    for (const int kpool : {4, 16}) {
      const KvFormat format = formats[round % 4];
      Random random(41 + static_cast<uint32_t>(kpool) + round);
      Weights w(kpool);
      const Ints tables[] = {{1, 4}, {3, 2}};
      const auto truth = [](int seq, int p) { return Token(static_cast<uint32_t>(1000 * (seq + 1) + p)); };

      World plain_world(geometry(kpool, format), 3, 0, 5);
      plain_world.reset(*ops);
      std::vector<Floats> want[2];
      for (int seq = 0; seq < 2; ++seq) {
        for (int p = 0; p < kTokens; ++p) {
          Step step({{.slot = seq, .position = p, .rows = 1, .replay = p == 0 ? 0 : 1, .table = tables[seq]}}, {});
          want[seq].push_back(run(*ops, plain_world, w, step, {truth(seq, p)})[0]);
        }
      }

      World world(geometry(kpool, format), 3, 0, 5);
      world.reset(*ops);
      int done[2] = {0, 0}, replay[2] = {0, 0};
      uint32_t garbage = 1 << 20;
      bool outputs_equal = true;
      while (done[0] < kTokens || done[1] < kTokens) {
        std::vector<Seq> windows;
        std::vector<Token> tokens;
        int kept[2];
        for (const int seq : {0, 1}) {
          const int rows = done[seq] < kTokens ? random.between(1, 16) : 0;
          kept[seq] = rows == 0 ? 0 : std::min(random.between(1, rows), kTokens - done[seq]);
          // A sequence that is finished stays in the batch without rows and with nothing to replay.
          if (rows == 0 && replay[seq] > 0) flush(*ops, world, w, {{SlotId{seq}}}, {{replay[seq]}});
          if (rows == 0) replay[seq] = 0;
          windows.push_back(
              {.slot = seq, .position = done[seq], .rows = rows, .replay = replay[seq], .table = tables[seq]});
          for (int i = 0; i < rows; ++i) tokens.push_back(i < kept[seq] ? truth(seq, done[seq] + i) : Token(garbage++));
        }
        Step step(windows, {}, 2, 1);
        const std::vector<Floats> got = run(*ops, world, w, step, tokens);
        for (const int seq : {0, 1}) steps += kept[seq] > 0 ? 1 : 0;
        for (const int seq : {0, 1}) {
          for (int i = 0; i < kept[seq]; ++i) {
            outputs_equal = outputs_equal && same_bits(got[at(step.begin[at(seq)] + i)], want[seq][at(done[seq] + i)]);
          }
          done[seq] += kept[seq];
          if (kept[seq] > 0) replay[seq] = kept[seq];
        }
        CHECK(all_zero(got.back()));
      }
      CHECK(outputs_equal);

      const SlotId slots[] = {SlotId{0}, SlotId::none, SlotId{1}};
      const int pending[] = {replay[0], 3, replay[1]}, one[] = {1, 0, 1};
      flush(*ops, world, w, slots, pending);
      flush(*ops, plain_world, w, slots, one);
      for (const int seq : {0, 1}) check_equal(world, plain_world, seq, tables[seq], kTokens);
      CHECK(all_zero(world.state(2, 0, 0)));
    }
  }
}

TEST_CASE("a window gives the same bits on one thread and on three") {
  Weights w(4);
  std::vector<Token> tokens;
  for (uint32_t i = 0; i < 12; ++i) tokens.emplace_back(i);
  std::vector<Floats> results[2];
  for (const int threads : {1, 3}) {
    const auto ops = make_cpu_ops(threads);
    World world(geometry(4, KvFormat::f32), 2, 0, 3);
    world.reset(*ops);
    Step first(
        {{.slot = 0, .position = 0, .rows = 7, .table = {1}}, {.slot = 1, .position = 0, .rows = 5, .table = {2}}}, {});
    run(*ops, world, w, first, tokens);
    Step next({{.slot = 0, .position = 3, .rows = 6, .replay = 3, .table = {1}},
               {.slot = 1, .position = 5, .rows = 6, .replay = 5, .table = {2}}},
              {});
    auto& out = results[threads == 3];
    out = run(*ops, world, w, next, tokens);
    for (const int slot : {0, 1}) {
      const auto s = world.state(slot, 1, 1), h = world.history(slot, 1), b = world.block_floats(slot + 1);
      out.emplace_back(s.begin(), s.end());
      out.emplace_back(h.begin(), h.end());
      out.emplace_back(b.begin(), b.begin() + 12 * kLatent);
    }
  }
  REQUIRE(results[0].size() == results[1].size());
  for (size_t i = 0; i < results[0].size(); ++i) CHECK(same_bits(results[0][i], results[1][i]));
}
