#include "kda_world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

constexpr int kHeads = 2, kDim = 20, kChannels = 3 * kHeads * kDim;

struct ConvInputs {
  ConvInputs(Random& random, int tokens) : T(tokens), raw(random.normals(int64_t{T} * kChannels)) {
    weight = random.normals(kChannels * 4, 0.5F);
    plain_weight = plain(weight, kChannels, 4);
  }
  int T;
  Floats raw, weight;
  Weight plain_weight;
};

Doubles oracle(const ConvInputs& in) {
  Doubles out(in.raw.size());
  for (int t = 0; t < in.T; ++t) {
    for (int c = 0; c < kChannels; ++c) {
      double sum = 0;
      for (int tap = 0; tap < 4; ++tap) {
        const int from = t - 3 + tap;
        if (from >= 0) sum += double(in.weight[at(c * 4 + tap)]) * double(in.raw[at(from * kChannels + c)]);
      }
      out[at(t * kChannels + c)] = sum / (1 + std::exp(-sum));
    }
  }
  return out;
}

Floats run(Ops& ops, World& world, ConvInputs& in, Step& step, int from) {
  const int64_t n = int64_t{step.rows} * kChannels;
  Floats raw(at(n), NAN), out(at(n), NAN);
  std::copy_n(in.raw.begin() + int64_t{from} * kChannels, int64_t{step.batch.rows} * kChannels, raw.begin());
  ops.kda_conv({&step.batch, 0, &world.caches, tensor(raw, {step.rows, kChannels}), &in.plain_weight,
                tensor(out, {step.rows, kChannels})});
  return out;
}

// The three raw columns before `tokens`, zeros before the start.
Floats history(const ConvInputs& in, int tokens) {
  Floats h(at(3 * kChannels), 0.0F);
  for (int j = 0; j < 3; ++j) {
    const int t = tokens - 3 + j;
    if (t >= 0) std::copy_n(in.raw.begin() + int64_t{t} * kChannels, kChannels, h.begin() + int64_t{j} * kChannels);
  }
  return h;
}

}  // namespace

TEST_CASE("kda_conv in pieces of any size, then in windows") {
  const auto ops = make_cpu_ops(3);
  Random random(21);
  ConvInputs in(random, 120);
  const Doubles want = oracle(in);
  for (int round = 0; round < 8; ++round) {
    World world(kda_geometry(kHeads, kDim), 2, 0, 0);
    world.reset(*ops);
    Floats got;
    int from = 0;
    while (from < 60) {
      const int rows = std::min(random.between(1, round < 4 ? 3 : 30), 60 - from);
      Step step({}, {{.slot = 1, .position = from, .rows = rows}});
      const Floats out = run(*ops, world, in, step, from);
      got.insert(got.end(), out.begin(), out.end());
      from += rows;
      CHECK(same_bits(world.history(1, 0), history(in, from)));
    }
    int replay = 0;
    while (from < in.T) {
      const int rows = std::min(random.between(1, 16), in.T - from);
      const int kept = random.between(1, rows);
      Step step({{.slot = 1, .position = from, .rows = rows, .replay = replay}}, {});
      const Floats out = run(*ops, world, in, step, from);
      CHECK(same_bits(world.history(1, 0), history(in, from)));
      got.insert(got.end(), out.begin(), out.begin() + int64_t{kept} * kChannels);
      from += kept;
      replay = kept;
    }
    CHECK(relative_error(got, want) < 1e-6);
  }
}

TEST_CASE("kda_conv exports its history and leaves padding alone") {
  const auto ops = make_cpu_ops(2);
  Random random(22);
  ConvInputs in(random, 20);
  const Ints cases[] = {{10, 20}, {12, 11}, {13, -1}, {-1, 19}};
  for (const Ints& exports : cases) {
    World world(kda_geometry(kHeads, kDim), 1, 3, 0);
    world.reset(*ops);
    Step first({}, {{.slot = 0, .position = 0, .rows = 10}});
    run(*ops, world, in, first, 0);
    Step step({},
              {{.slot = 0, .position = 10, .rows = 10, .export_pos = exports, .export_snap = {2, 0}},
               {.slot = -1, .position = 0, .rows = 0}},
              2, 1);
    const Floats out = run(*ops, world, in, step, 10);
    CHECK(all_zero(std::span<const float>(out).subspan(at(10 * kChannels))));
    for (size_t e = 0; e < 2; ++e) {
      if (exports[e] >= 0) CHECK(same_bits(world.saved_history(e == 0 ? 2 : 0, 0), history(in, exports[e])));
    }
    CHECK(std::isnan(world.saved_history(1, 0)[0]));
  }
  World world(kda_geometry(kHeads, kDim), 1, 0, 0);
  world.reset(*ops);
  Step step({{.slot = -1, .position = 3, .rows = 4}}, {});
  CHECK(all_zero(run(*ops, world, in, step, 3)));
  CHECK(all_zero(world.history(0, 0)));
}
