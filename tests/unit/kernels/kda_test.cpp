#include "kda_world.h"

using namespace glm53;
using namespace glm53::test;

namespace {

struct Shape {
  int heads, dim, T;
  bool worst;
};

const Shape kShapes[] = {{2, 16, 200, false}, {2, 24, 130, false}, {1, 128, 200, false},
                         {1, 128, 200, true}, {3, 8, 70, true},    {1, 20, 17, false}};

Doubles oracle_outputs(const KdaInputs& in, KdaOracle& oracle) {
  const size_t width = at(in.heads) * at(in.dim);
  Doubles out(at(in.T) * width);
  for (int t = 0; t < in.T; ++t) oracle.token(in, t, out.data() + at(t) * width);
  return out;
}

// Runs positions [0, T) in chunk pieces that end at `cuts` and T; returns all outputs.
Floats run_pieces(Ops& ops, World& world, KdaInputs& in, const Ints& cuts, int slot) {
  Floats out;
  int from = 0;
  Ints ends = cuts;
  ends.push_back(in.T);
  for (const int32_t end : ends) {
    Step step({}, {{.slot = slot, .position = from, .rows = end - from}});
    KdaRun run(in, step, from, world.caches, 0);
    ops.kda_chunk(run.args);
    out.insert(out.end(), run.out.begin(), run.out.end());
    from = end;
  }
  return out;
}

Floats whole_state(World& world, int slot) {
  Floats all;
  for (int h = 0; h < world.caches.geometry.kda_heads; ++h) {
    const auto s = world.state(slot, 0, h);
    all.insert(all.end(), s.begin(), s.end());
  }
  return all;
}

}  // namespace

TEST_CASE("kda_window follows the recurrence") {
  const auto ops = make_cpu_ops(2);
  for (const Shape& s : kShapes) {
    CAPTURE(s.dim);
    Random random(11);
    KdaInputs in(random, s.T, s.heads, s.dim, s.worst);
    KdaOracle oracle(s.heads, s.dim);
    const Doubles want = oracle_outputs(in, oracle);
    World world(kda_geometry(s.heads, s.dim), 2, 0, 0);
    world.reset(*ops);
    Floats got;
    int replay = 0;
    for (int from = 0; from < in.T;) {
      const int rows = std::min(random.between(1, 16), in.T - from);
      Step step({{.slot = 1, .position = from, .rows = rows, .replay = replay}}, {});
      KdaRun run(in, step, from, world.caches, 0);
      ops->kda_window(run.args);
      got.insert(got.end(), run.out.begin(), run.out.end());
      from += rows;
      replay = rows;
    }
    CHECK(relative_error(got, want) < 3e-6);
    const SlotId slots[] = {SlotId{1}};
    const Weight* a_log[] = {&in.a_log_weight};
    const Weight* dt_bias[] = {&in.dt_bias_weight};
    ops->kda_flush({slots, std::span<const int>(&replay, 1), &world.caches, a_log, dt_bias, in.lower});
    CHECK(relative_error(whole_state(world, 1), oracle.state) < 3e-6);
    CHECK(all_zero(whole_state(world, 0)));
  }
}

TEST_CASE("kda_chunk follows the recurrence, also from a position off the grid") {
  const auto ops = make_cpu_ops(2);
  for (const Shape& s : kShapes) {
    CAPTURE(s.dim);
    Random random(12);
    KdaInputs in(random, s.T, s.heads, s.dim, s.worst);
    KdaOracle oracle(s.heads, s.dim);
    const Doubles want = oracle_outputs(in, oracle);
    for (const Ints& cuts : {Ints{}, Ints{5}, Ints{1, 2, 16}, Ints{3, 16}}) {
      if (!cuts.empty() && cuts.back() >= in.T) continue;
      World world(kda_geometry(s.heads, s.dim), 2, 0, 0);
      world.reset(*ops);
      CHECK(relative_error(run_pieces(*ops, world, in, cuts, 0), want) < 3e-6);
      CHECK(relative_error(whole_state(world, 0), oracle.state) < 3e-6);
      CHECK(all_zero(whole_state(world, 1)));
    }
  }
}

TEST_CASE("kda_chunk gives the same bits however a prompt is cut on the grid, and on any number of threads") {
  const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
  Random random(13);
  KdaInputs in(random, 200, 3, 24, false);
  World world(kda_geometry(3, 24), 1, 0, 0);
  world.reset(*one);
  const Floats out = run_pieces(*one, world, in, {}, 0);
  const Floats state = whole_state(world, 0);
  for (const Ints& cuts : {Ints{64}, Ints{128}, Ints{64, 128, 192}, Ints{192}}) {
    world.reset(*three);
    CHECK(same_bits(run_pieces(*three, world, in, cuts, 0), out));
    CHECK(same_bits(whole_state(world, 0), state));
  }
}

TEST_CASE("kda_chunk exports the state after any number of tokens of its piece") {
  const auto ops = make_cpu_ops(2);
  Random random(14);
  KdaInputs in(random, 150, 2, 16, false);
  for (const int start : {0, 7}) {
    for (const Ints& exports : {Ints{64, 128}, Ints{150, 65}, Ints{start, 149}, Ints{-1, 130}}) {
      World world(kda_geometry(2, 16), 1, 4, 0);
      world.reset(*ops);
      if (start > 0) {
        Step before({}, {{.slot = 0, .position = 0, .rows = start}});
        KdaRun run(in, before, 0, world.caches, 0);
        ops->kda_chunk(run.args);
      }
      Step step({},
                {{.slot = 0, .position = start, .rows = 150 - start, .export_pos = exports, .export_snap = {3, 1}}});
      KdaRun run(in, step, start, world.caches, 0);
      ops->kda_chunk(run.args);
      for (size_t e = 0; e < 2; ++e) {
        if (exports[e] < 0) continue;
        KdaOracle oracle(2, 16);
        for (int t = 0; t < exports[e]; ++t) oracle.token(in, t, nullptr);
        Floats got;
        for (int h = 0; h < 2; ++h) {
          const auto s = world.saved_state(e == 0 ? 3 : 1, 0, h);
          got.insert(got.end(), s.begin(), s.end());
        }
        if (exports[e] == 0) {
          CHECK(all_zero(got));
        } else {
          CHECK(relative_error(got, oracle.state) < 3e-6);
        }
        // A piece that ends there leaves the same bits in the slot.
        World other(kda_geometry(2, 16), 1, 0, 0);
        other.reset(*ops);
        Ints cuts;
        if (start > 0 && start < exports[e]) cuts.push_back(start);
        KdaInputs shorter = in;
        shorter.T = exports[e];
        if (exports[e] > 0) run_pieces(*ops, other, shorter, cuts, 0);
        CHECK(same_bits(got, whole_state(other, 0)));
      }
      CHECK(std::isnan(world.saved_state(0, 0, 0)[0]));
      CHECK(std::isnan(world.saved_state(2, 0, 0)[0]));
    }
  }
}

TEST_CASE("kda leaves padding alone and writes zeros for it") {
  const auto ops = make_cpu_ops(2);
  Random random(15);
  KdaInputs in(random, 40, 2, 16, false);
  World world(kda_geometry(2, 16), 2, 0, 0);
  world.reset(*ops);
  // Rows 0-2: a window; 3-4: a window without a slot; 5-9: a chunk; 10-11: a chunk without a slot; then three padding
  // rows.
  Step step({{.slot = 1, .position = 0, .rows = 3}, {.slot = -1, .position = 0, .rows = 2}},
            {{.slot = 0, .position = 0, .rows = 5}, {.slot = -1, .position = 9, .rows = 2}}, 3, 2);
  KdaRun run(in, step, 0, world.caches, 0);
  ops->kda_window(run.args);
  const auto rows = [&](int begin, int end) {
    return std::span<const float>(run.out).subspan(at(begin * 32), at((end - begin) * 32));
  };
  CHECK(all_zero(rows(3, 5)));
  CHECK(all_zero(rows(12, 15)));
  CHECK(std::isnan(rows(5, 12)[0]));  // the chunk family's rows are not kda_window's
  std::fill_n(run.out.begin() + 12 * 32, 96, NAN);
  ops->kda_chunk(run.args);
  CHECK(all_zero(rows(10, 12)));
  CHECK(all_zero(rows(12, 15)));
  CHECK(!all_zero(rows(0, 3)));
  for (const float x : run.out) CHECK(std::isfinite(x));
  CHECK(all_zero(whole_state(world, 1)));  // nothing committed yet
  CHECK(!all_zero(whole_state(world, 0)));
}

TEST_CASE("kda refuses a batch that contradicts itself") {
  const auto ops = make_cpu_ops(1);
  Random random(16);
  KdaInputs in(random, 40, 2, 16, false);
  World world(kda_geometry(2, 16), 2, 1, 0);
  world.reset(*ops);
  const auto refused = [&](const std::vector<Seq>& windows, const std::vector<Seq>& chunks) {
    Step step(windows, chunks);
    KdaRun run(in, step, 0, world.caches, 0);
    CHECK_THROWS_AS(ops->kda_window(run.args), Error);
    CHECK_THROWS_AS(ops->kda_chunk(run.args), Error);
  };
  refused({{.slot = 2}}, {});
  refused({{.slot = 0, .position = 20, .rows = 17}}, {});
  refused({{.slot = 0, .position = 20, .rows = 1, .replay = 17}}, {});
  refused({}, {{.slot = 0, .position = 4, .rows = 2, .replay = 1}});
  refused({}, {{.slot = 0, .position = 4, .rows = 2, .export_pos = {7}, .export_snap = {0}}});
  Step step({}, {{.slot = 0, .position = 4, .rows = 2, .export_pos = {6}, .export_snap = {1}}});
  KdaRun run(in, step, 0, world.caches, 0);
  CHECK_THROWS_AS(ops->kda_chunk(run.args), Error);  // no such snapshot
  run.args.layer = 1;
  CHECK_THROWS_AS(ops->kda_chunk(run.args), Error);
  run.args.layer = 0;
  world.caches.records = Tensor{};
  CHECK_THROWS_AS(ops->kda_window(run.args), Error);
}

TEST_CASE("gated_norm") {
  const auto ops = make_cpu_ops(3);
  Random random(17);
  const int rows = 5, heads = 3, dim = 20;
  Floats o = random.normals(rows * heads * dim), gate = random.normals(rows * heads * dim, 3.0F);
  Floats weight = random.normals(dim, 0.1F, 1.0F);
  const Weight w = plain(weight, dim, 1);
  Doubles want(o.size());
  for (size_t head = 0; head < at(rows * heads); ++head) {
    double squares = 0;
    for (size_t i = 0; i < at(dim); ++i) squares += double(o[head * 20 + i]) * double(o[head * 20 + i]);
    for (size_t i = 0; i < at(dim); ++i) {
      const size_t j = head * 20 + i;
      want[j] = double(o[j]) / std::sqrt(squares / dim + 1e-5) * double(weight[i]) / (1 + std::exp(-double(gate[j])));
    }
  }
  const Tensor y = tensor(o, {rows, heads * dim});  // in place
  ops->gated_norm({y, tensor(gate, {rows, heads * dim}), &w, 1e-5F, dim, y});
  CHECK(relative_error(o, want) < 1e-6);
}
