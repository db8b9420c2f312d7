// Kimi delta attention and its convolution on a GPU against the CPU reference: prompt pieces with exports, windows with
// replay, flush; a prompt cut on the grid of chunks gives the same bits, a window's rows those of one at a time.
#include "tests/device/device.h"

namespace glm53::test {
namespace {

constexpr int kHeads = 3, kLayer = 1, kRows = 210;

/// Inputs of a whole sequence, rounded to bf16, and weights.
struct Inputs {
  Inputs(Device& device, int head_dim, Random& random) : dim(head_dim), width(kHeads * head_dim) {
    raw = random.normals(int64_t{kRows} * 3 * width);
    gate = random.normals(int64_t{kRows} * width);
    beta = random.normals(int64_t{kRows} * kHeads);
    conv = random.normals(int64_t{3} * width * 4, 0.5F);
    a_log = random.normals(kHeads, 0.5F);
    dt_bias = random.normals(width);
    raw_d = device.halves(raw, {kRows, 3 * width});
    gate_d = device.halves(gate, {kRows, width});
    beta_d = device.halves(beta, {kRows, kHeads});
    conv_w = plain(conv, 3 * width, 4);
    a_log_w = plain(a_log, kHeads, 1);
    dt_bias_w = plain(dt_bias, width, 1);
    conv_dw = device.put(conv_w);
    a_log_dw = device.put(a_log_w);
    dt_bias_dw = device.put(dt_bias_w);
  }
  int dim, width;
  Floats raw, gate, beta, conv, a_log, dt_bias;
  Tensor raw_d, gate_d, beta_d;
  Weight conv_w, a_log_w, dt_bias_w, conv_dw, a_log_dw, dt_bias_dw;
};

World make_world(int dim) {
  CacheGeometry g;
  g.kda_layers = 2;
  g.kda_heads = kHeads;
  g.head_dim = dim;
  g.conv_channels = 3 * kHeads * dim;
  World world(g, 2, 2, 0);
  world.reset(*make_cpu_ops(1));
  return world;
}

Caches upload(Device& device, const Caches& host) {
  Caches c = host;
  for (Tensor* t : {&c.state, &c.conv, &c.records, &c.snap_state, &c.snap_conv}) *t = device.put(*t);
  return c;
}

/// Of the chunked form, whose products take bf16, as far as from f32.
constexpr double kChunked = 1e-2;

struct Part {
  int position, rows, replay;
  bool window;
  Ints export_pos{}, export_snap{};
};

/// Convolution and recurrence of some rows; what the convolution and the core gave.
struct Given {
  Floats mixed, out;
};

Given on_device(Device& device, const Inputs& in, const Caches& caches, const Part& p, Step& step) {
  const Tensor mixed = device.poisoned(Dtype::bf16, {p.rows, 3 * in.width});
  const Tensor out = device.poisoned(Dtype::f32, {p.rows, in.width});
  const auto rows = [&](const Tensor& t) { return t.rows(p.position, p.position + p.rows); };
  device.ops().kda_conv({&step.batch, kLayer, &caches, rows(in.raw_d), &in.conv_dw, mixed});
  const KdaArgs args{.batch = &step.batch,
                     .layer = kLayer,
                     .caches = &caches,
                     .q = mixed.columns(0, in.width),
                     .k = mixed.columns(in.width, 2 * in.width),
                     .v = mixed.columns(2 * in.width, 3 * in.width),
                     .gate = rows(in.gate_d),
                     .beta = rows(in.beta_d),
                     .a_log = &in.a_log_dw,
                     .dt_bias = &in.dt_bias_dw,
                     .lower_bound = -5,
                     .out = out};
  p.window ? device.ops().kda_window(args) : device.ops().kda_chunk(args);
  return {device.fetch(mixed), device.fetch(out)};
}

/// The same on the CPU, whose core takes what the device's convolution gave.
Given on_host(Ops& ops, Inputs& in, const Caches& caches, const Part& p, Step& step, const Floats& mixed) {
  Given given{Floats(mixed.size(), NAN), Floats(at(int64_t{p.rows} * in.width), NAN)};
  const auto rows = [&](Floats& v, int64_t width) {
    return tensor(v, {kRows, width}).rows(p.position, p.position + p.rows);
  };
  ops.kda_conv({&step.batch, kLayer, &caches, rows(in.raw, 3 * in.width), &in.conv_w,
                tensor(given.mixed, {p.rows, 3 * in.width})});
  Floats taken = mixed;
  const Tensor m = tensor(taken, {p.rows, 3 * in.width});
  const KdaArgs args{.batch = &step.batch,
                     .layer = kLayer,
                     .caches = &caches,
                     .q = m.columns(0, in.width),
                     .k = m.columns(in.width, 2 * in.width),
                     .v = m.columns(2 * in.width, 3 * in.width),
                     .gate = rows(in.gate, in.width),
                     .beta = rows(in.beta, kHeads),
                     .a_log = &in.a_log_w,
                     .dt_bias = &in.dt_bias_w,
                     .lower_bound = -5,
                     .out = tensor(given.out, {p.rows, in.width})};
  p.window ? ops.kda_window(args) : ops.kda_chunk(args);
  return given;
}

std::unique_ptr<Step> step_of(const Part& p) {
  const Seq seq{.slot = 1,
                .position = p.position,
                .rows = p.rows,
                .replay = p.replay,
                .table = {},
                .export_pos = p.export_pos,
                .export_snap = p.export_snap};
  return p.window ? std::make_unique<Step>(std::vector<Seq>{seq}, std::vector<Seq>{})
                  : std::make_unique<Step>(std::vector<Seq>{}, std::vector<Seq>{seq});
}

double farthest(std::span<const float> got, std::span<const float> want) {
  return relative_error(got, widen(want));
}

/// The layer's part of slot 1 or of a snapshot, as floats.
Floats part_of(Device& device, const Tensor& pool, int64_t item) {
  const Tensor layer = pool[item][kLayer];
  Floats all(at(layer.elements()));
  const Tensor flat = Tensor::of(layer.data, Dtype::f32, {layer.elements()}, layer.place);
  device.ops().copy(tensor(all, {layer.elements()}), flat);
  device.ops().synchronize();
  return all;
}

TEST_CASE("kda: pieces with exports, windows with replay and flush follow the CPU") {
  Random random(1);
  Device device;
  const auto cpu = make_cpu_ops(1);
  for (const int dim : {64, 128, 96}) {
    CAPTURE(dim);
    Inputs in(device, dim, random);
    World world = make_world(dim);
    const Caches caches = upload(device, world.caches);
    // The fifth row of the first window was not accepted, and so on.
    for (const Part& p : {Part{0, 40, 0, false, {17, 40}, {0, 1}},
                          {40, 23, 0, false, {40, 50}, {1, 0}},
                          {63, 5, 0, true},
                          {67, 3, 4, true},
                          {68, 1, 1, true},
                          {68, 16, 0, true},
                          {84, 2, 16, true}}) {
      CAPTURE(p.position);
      const auto step = step_of(p), again = step_of(p);
      const Given got = on_device(device, in, caches, p, *step);
      const Given want = on_host(*cpu, in, world.caches, p, *again, got.mixed);
      CHECK(farthest(got.mixed, want.mixed) < 5e-3);  // bf16
      CHECK(farthest(got.out, want.out) < (dim == 96 ? 1e-4 : kChunked));
    }
    const std::vector<SlotId> slots{static_cast<SlotId>(1)};
    const std::vector<int> replay{2};
    const auto flush = [&](Ops& ops, const Caches& c, const Weight& a, const Weight& d) {
      const std::vector<const Weight*> as{&a, &a}, ds{&d, &d};
      ops.kda_flush({slots, replay, &c, as, ds, -5});
    };
    flush(device.ops(), caches, in.a_log_dw, in.dt_bias_dw);
    flush(*cpu, world.caches, in.a_log_w, in.dt_bias_w);
    const double near = dim == 96 ? 1e-4 : kChunked;
    CHECK(farthest(part_of(device, caches.state, 1), part_of(device, world.caches.state, 1)) < near);
    for (const int64_t snap : {0, 1}) {
      CHECK(farthest(part_of(device, caches.snap_state, snap), part_of(device, world.caches.snap_state, snap)) < near);
      CHECK(farthest(part_of(device, caches.snap_conv, snap), part_of(device, world.caches.snap_conv, snap)) < 5e-3);
    }
  }
}

TEST_CASE("kda: a long piece follows the CPU; exports inside chunks are the states of pieces that end there") {
  Random random(3);
  Device device;
  const auto cpu = make_cpu_ops(1);
  for (const int dim : {64, 128}) {
    CAPTURE(dim);
    Inputs in(device, dim, random);
    const auto run = [&](const Part& p, bool host) {
      World world = make_world(dim);
      const Caches caches = upload(device, world.caches);
      const auto step = step_of(p), again = step_of(p);
      Given given = on_device(device, in, caches, p, *step);
      if (host) {
        const Given want = on_host(*cpu, in, world.caches, p, *again, given.mixed);
        CHECK(farthest(given.out, want.out) < kChunked);
        for (const int64_t snap : {0, 1}) {
          CHECK(farthest(part_of(device, caches.snap_state, snap), part_of(device, world.caches.snap_state, snap)) <
                kChunked);
        }
        CHECK(farthest(part_of(device, caches.state, 1), part_of(device, world.caches.state, 1)) < kChunked);
      }
      return std::pair(part_of(device, caches.state, 1),
                       std::pair(part_of(device, caches.snap_state, 0), part_of(device, caches.snap_state, 1)));
    };
    for (const auto& [a, b] : {std::pair{70, 128}, {190, 130}, {133, 133}, {210, 1}}) {
      const auto whole = run({0, kRows, 0, false, {a, b}, {0, 1}}, true);
      CHECK(same_bits(whole.second.first, run({0, a, 0, false}, false).first));
      CHECK(same_bits(whole.second.second, run({0, b, 0, false}, false).first));
      CHECK(same_bits(whole.first, run({0, kRows, 0, false}, false).first));
    }
  }
}

TEST_CASE("kda: a prompt cut on the grid and a window of any width give the same bits") {
  Random random(2);
  Device device;
  for (const int dim : {64, 128}) {
    Inputs in(device, dim, random);
    for (const bool window : {false, true}) {
      const int total = window ? 16 : kRows;
      const auto run = [&](int each) {
        World world = make_world(dim);
        const Caches caches = upload(device, world.caches);
        Given all;
        for (int first = 0; first < total; first += each) {
          const Part p{first, std::min(each, total - first), window && first > 0 ? each : 0, window};
          const auto step = step_of(p);
          const Given part = on_device(device, in, caches, p, *step);
          all.mixed.insert(all.mixed.end(), part.mixed.begin(), part.mixed.end());
          all.out.insert(all.out.end(), part.out.begin(), part.out.end());
        }
        return all;
      };
      const Given whole = run(total);
      for (const int each : window ? Ints{1, 2, 4, 8} : Ints{64, 128, 192}) {
        const Given cut = run(each);
        CHECK(same_bits(cut.mixed, whole.mixed));
        CHECK(same_bits(cut.out, whole.out));
      }
    }
  }
}

}  // namespace
}  // namespace glm53::test
