// The hyper-connection seam on a GPU against the CPU reference.
#include "tests/device/device.h"

namespace glm53::test {
namespace {

struct State {
  Floats streams, y, post, comb;
};

struct Outcome {
  Floats streams, post, comb, u;
};

double farthest(std::span<const float> got, std::span<const float> want) {
  return relative_error(got, widen(want));
}

TEST_CASE("mhc_post_pre and mhc_pre with four streams: values, and every row as if alone") {
  Random random(1);
  Device device;
  const auto cpu = make_cpu_ops(1);
  for (const int64_t hidden : {128, 384, 4096}) {
    const int64_t values = 24;
    const TestWeight fn(WeightFormat::bf16, values, 4 * hidden, random), norm(WeightFormat::bf16, hidden, 1, random);
    Floats base = random.normals(values), scale = random.normals(3);
    const Weight host_base = plain(base, values, 1), host_scale = plain(scale, 3, 1);
    const Weight fn_d = device.put(fn.w), base_d = device.put(host_base), scale_d = device.put(host_scale);
    const Weight norm_d = device.put(norm.w);
    for (const int64_t rows : {1, 3, 4, 9, 70}) {
      CAPTURE(hidden);
      CAPTURE(rows);
      State s{random.normals(rows * 4 * hidden), random.normals(rows * hidden), random.normals(rows * 4),
              random.normals(rows * 16)};
      const auto run = [&](Ops& ops, bool both, const Tensor& streams, const Tensor& y, const Tensor& post,
                           const Tensor& comb, const Tensor& u, MhcSite site, const Weight* n) {
        const MhcPreArgs pre{streams, site, n, 1e-5F, 1e-6F, 20, post, comb, u};
        both ? ops.mhc_post_pre({{streams, y, post, comb}, pre}) : ops.mhc_pre(pre);
      };
      const Tensor y = device.halves(s.y, {rows, hidden});
      Floats streams = s.streams;
      device.halves(streams, {rows, 4, hidden});  // rounded like the device's
      for (const bool both : {true, false}) {
        const auto on_device = [&](int64_t first, int64_t n) {
          const auto part = [&](const Floats& v, int64_t width) {
            return Floats(v.begin() + first * width, v.begin() + (first + n) * width);
          };
          Floats mine = part(streams, 4 * hidden);
          const Tensor x = device.halves(mine, {n, 4, hidden}), post = device.floats(part(s.post, 4), {n, 4});
          const Tensor comb = device.floats(part(s.comb, 16), {n, 4, 4}), u = device.poisoned(Dtype::f32, {n, hidden});
          run(device.ops(), both, x, y.rows(first, first + n), post, comb, u, {&fn_d, &base_d, &scale_d}, &norm_d);
          return Outcome{device.fetch(x), device.fetch(post), device.fetch(comb), device.fetch(u)};
        };
        Outcome want{streams, s.post, s.comb, Floats(at(rows * hidden), NAN)};
        if (both) {  // the device stores the streams in bf16 between the two halves
          cpu->mhc_post({tensor(want.streams, {rows, 4, hidden}), tensor(s.y, {rows, hidden}),
                         tensor(want.post, {rows, 4}), tensor(want.comb, {rows, 4, 4})});
          for (float& v : want.streams) v = bf16_to_f32(f32_to_bf16(v));
        }
        run(*cpu, false, tensor(want.streams, {rows, 4, hidden}), {}, tensor(want.post, {rows, 4}),
            tensor(want.comb, {rows, 4, 4}), tensor(want.u, {rows, hidden}), {&fn.w, &host_base, &host_scale}, &norm.w);
        const Outcome got = on_device(0, rows);
        CHECK(farthest(got.streams, want.streams) < 5e-3);
        CHECK(farthest(got.post, want.post) < 1e-3);
        CHECK(farthest(got.comb, want.comb) < 1e-3);
        CHECK(farthest(got.u, want.u) < 2e-3);
        const Outcome last = on_device(rows - 1, 1);
        CHECK(same_bits(last.u, std::span(got.u).subspan(at((rows - 1) * hidden))));
        CHECK(same_bits(last.streams, std::span(got.streams).subspan(at((rows - 1) * 4 * hidden))));
        CHECK(same_bits(last.comb, std::span(got.comb).subspan(at((rows - 1) * 16))));
      }
    }
  }
}

}  // namespace
}  // namespace glm53::test
