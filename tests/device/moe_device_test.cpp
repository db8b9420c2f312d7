// The mixture of experts with 4-bit EXL3 weights on a GPU against f64: routing of every shape, rows as if alone.
#include "tests/device/device.h"
#include "tests/unit/kernels/moe_oracle.h"

namespace glm53::test {
namespace {

struct Experts {
  std::vector<TestWeight> gate, up, down;
  std::vector<Weight> g, u, d;
  Experts(Device& device, int count, int64_t inter, int64_t hidden, Random& random, int bits = 4,
          Codebook codebook = Codebook::mcg) {
    for (int e = 0; e < count; ++e) {
      gate.emplace_back(WeightFormat::exl3, inter, hidden, random, bits, codebook);
      up.emplace_back(WeightFormat::exl3, inter, hidden, random, bits, codebook);
      down.emplace_back(WeightFormat::exl3, hidden, inter, random, bits, codebook);
      g.push_back(device.put(gate.back().w));
      u.push_back(device.put(up.back().w));
      d.push_back(device.put(down.back().w));
    }
  }
};

/// k different experts a row, ascending; every fifth row without any. `hot` experts are chosen first.
Routing route(int64_t rows, int64_t k, int experts, int hot, Random& random) {
  Routing out{Ints(at(rows * k), -1), Floats(at(rows * k), 0.0F), k};
  for (int64_t r = 0; r < rows; ++r) {
    if (r % 5 == 4) continue;
    Ints ids(at(experts));
    for (int e = 0; e < experts; ++e) ids[at(e)] = e;
    for (int64_t j = hot; j < k; ++j) std::swap(ids[at(j)], ids[at(random.between(static_cast<int>(j), experts - 1))]);
    std::sort(ids.begin(), ids.begin() + k);
    for (int64_t j = 0; j < k; ++j) {
      out.index[at(r * k + j)] = ids[at(j)];
      out.weight[at(r * k + j)] = 0.2F + 0.1F * static_cast<float>(random.between(0, 9));
    }
  }
  return out;
}

Floats run(Device& device, const Tensor& x, const Routing& routing, int64_t first, const Experts& e, float limit,
           int window) {
  const int64_t rows = x.dim(0), hidden = x.dim(1), k = routing.k;
  const auto part = [&](const auto& v) { return std::vector(v.begin() + first * k, v.begin() + (first + rows) * k); };
  const Tensor out = device.poisoned(Dtype::f32, {rows, hidden});
  device.ops().moe({.x = x,
                    .index = device.ints(part(routing.index), {rows, k}),
                    .weight = device.floats(part(routing.weight), {rows, k}),
                    .gate = e.g,
                    .up = e.u,
                    .down = e.d,
                    .limit = limit,
                    .out = out,
                    .window_rows = window});
  return device.fetch(out);
}

void check(Device& device, const Experts& e, int64_t rows, int64_t k, int hot, float limit, Random& random) {
  const int64_t hidden = e.gate.front().w.in;
  Floats x = random.normals(rows * hidden);
  for (int64_t r = 0; r < rows; ++r) {  // rows of very different size
    const float scale = r % 3 == 1 ? 1e-6F : r % 3 == 2 ? 3.0F : 1.0F;
    for (int64_t i = 0; i < hidden; ++i) x[at(r * hidden + i)] *= scale;
  }
  const Routing routing = route(rows, k, static_cast<int>(e.g.size()), hot, random);
  const Tensor xs = device.halves(x, {rows, hidden});
  const Doubles want = moe_oracle(x, routing, rows, hidden, e, static_cast<double>(limit));
  for (const bool window : {true, false}) {
    const Floats all = run(device, xs, routing, 0, e, limit, window ? static_cast<int>(rows) : 0);
    for (int64_t r = 0; r < rows; ++r) {
      CAPTURE(r);
      CAPTURE(window);
      const auto got = std::span(all).subspan(at(r * hidden), at(hidden));
      if (r % 5 == 4) {
        CHECK(all_zero(got));
        continue;
      }
      CHECK(distance(got, std::span(want).subspan(at(r * hidden), at(hidden))) < 2e-3);
      if (r % 4 == 0) {
        CHECK(same_bits(run(device, xs.rows(r, r + 1), routing, r, e, limit, window ? 1 : 0), got));
      }
    }
  }
}

TEST_CASE("moe, EXL3 4 bits MCG: routings, clamps, sizes of rows") {
  Random random(1);
  Device device;
  const Experts e(device, 12, 256, 384, random);
  for (const float limit : {0.3F, 10.0F}) {
    for (const int64_t rows : {1, 2, 3, 8, 16, 32, 41}) check(device, e, rows, 4, 0, limit, random);
  }
  check(device, e, 70, 3, 2, 10.0F, random);  // two experts that every row takes
}

TEST_CASE("moe, EXL3 4 bits MCG: more inputs than one slice, more outputs than one block") {
  Random random(2);
  Device device;
  const Experts e(device, 3, 384, 2176, random);
  for (const int64_t rows : {1, 7, 20}) check(device, e, rows, 2, 0, 10.0F, random);
}

TEST_CASE("moe, EXL3 of other bits and codebooks") {
  Random random(3);
  Device device;
  for (const int bits : {1, 3, 8}) {
    for (const Codebook codebook : {Codebook::three_inst, Codebook::mcg, Codebook::mul1}) {
      const Experts e(device, 4, 128, 128, random, bits, codebook);
      check(device, e, 6, 2, 0, 10.0F, random);
    }
  }
}

}  // namespace
}  // namespace glm53::test
