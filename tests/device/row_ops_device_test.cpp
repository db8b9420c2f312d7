// Norms and the router on a GPU: f64 and the rules of choice, rows alone and among others.
#include <algorithm>
#include <numeric>

#include "tests/device/device.h"

namespace glm53::test {
namespace {

TEST_CASE("rms_norm: f64, with and without weight, in place, widths of both forms") {
  Random random(1);
  Device device;
  for (const int64_t width : {8, 40, 100, 4096, 8192, 8200}) {
    CAPTURE(width);
    const int64_t rows = 3;
    Floats x = random.normals(rows * width), scale = random.normals(width, 0.2F, 1.0F);
    const Tensor xs = device.halves(x, {rows, width});
    Weight half;
    half.format = WeightFormat::bf16;
    half.out = width;
    half.in = 1;
    Floats rounded = scale;
    half.codes = device.halves(rounded, {width, 1});
    const Weight full = device.put(plain(scale, width, 1));
    for (const int kind : {0, 1, 2}) {
      const Weight* w = kind == 0 ? nullptr : kind == 1 ? &half : &full;
      const Tensor y = device.poisoned(Dtype::bf16, {rows, width});
      device.ops().rms_norm({xs, w, 1e-5F, y});
      Doubles want;
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < width; ++i) squares += static_cast<double>(x[at(r * width + i)]) * x[at(r * width + i)];
        const double norm = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
        for (int64_t i = 0; i < width; ++i) {
          want.push_back(x[at(r * width + i)] * norm * (kind == 0 ? 1.0F : kind == 1 ? rounded[at(i)] : scale[at(i)]));
        }
      }
      const Floats got = device.fetch(y);
      CHECK(relative_error(got, want) < 5e-3);
      CHECK(distance(got, want) < 3e-3);
      const Tensor alone = device.poisoned(Dtype::bf16, {1, width});
      device.ops().rms_norm({xs.rows(1, 2), w, 1e-5F, alone});
      CHECK(same_bits(device.fetch(alone), std::span(got).subspan(at(width), at(width))));
      Floats copy = x;
      const Tensor own = device.halves(copy, {rows, width});
      device.ops().rms_norm({own, w, 1e-5F, own});
      CHECK(same_bits(device.fetch(own), got));
    }
  }
}

TEST_CASE("router: the best by biased score, ties to the lower expert, weights in ascending order; padding") {
  Random random(2);
  Device device;
  struct Case {
    int experts, groups, top_groups, k;
  };
  for (const auto& [experts, groups, top_groups, k] :
       {Case{6, 1, 1, 2}, {288, 1, 1, 8}, {1024, 1, 1, 32}, {40, 1, 1, 40}, {1100, 1, 1, 4}, {64, 8, 3, 8}}) {
    CAPTURE(experts);
    CAPTURE(groups);
    const int64_t rows = experts == 288 ? 70 : 5, width = 64, real = rows - 1;  // 70: the form for many rows
    Floats x = random.normals(rows * width), w = random.normals(int64_t{experts} * width, 0.1F);
    Floats bias = random.normals(experts, 0.05F);
    std::copy_n(w.begin(), width, w.begin() + 3 * width);  // experts 0 and 3 tie
    bias[0] = bias[3] = 0.6F;
    const Tensor xs = device.halves(x, {rows, width});
    const Weight wd = device.put(plain(w, experts, width)), bd = device.put(plain(bias, experts, 1));
    const auto run = [&](const Tensor& of, int n_real) {
      const int64_t n = of.dim(0);
      const Tensor index = device.ints(Ints(at(n * k), 77), {n, k});
      const Tensor weight = device.poisoned(Dtype::f32, {n, k}), logits = device.poisoned(Dtype::f32, {n, experts});
      device.ops().router({.x = of,
                           .w = &wd,
                           .bias = &bd,
                           .groups = groups,
                           .top_groups = top_groups,
                           .k = k,
                           .normalize = true,
                           .scale = 2.5F,
                           .real_rows = n_real,
                           .index = index,
                           .weight = weight,
                           .logits = logits});
      Ints chosen(at(n * k));
      device.ops().copy(tensor(chosen, {n, k}), index);
      device.ops().synchronize();
      return std::tuple(chosen, device.fetch(weight), device.fetch(logits));
    };
    const auto [chosen, weight, logits] = run(xs, static_cast<int>(real));
    for (int64_t r = 0; r < rows; ++r) {
      const std::span mine = std::span(chosen).subspan(at(r * k), at(k));
      const auto weights = std::span(weight).subspan(at(r * k), at(k));
      if (r >= real) {
        CHECK(std::all_of(mine.begin(), mine.end(), [](int e) { return e == -1; }));
        CHECK(all_zero(weights));
        continue;
      }
      std::vector<double> s, biased;
      for (int e = 0; e < experts; ++e) {
        s.push_back(1 / (1 + std::exp(-static_cast<double>(logits[at(r * experts + e)]))));
        biased.push_back(s.back() + static_cast<double>(bias[at(e)]));
      }
      if (groups == 1) {
        Ints order(at(experts));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return biased[at(a)] > biased[at(b)]; });
        order.resize(at(k));
        std::sort(order.begin(), order.end());
        CHECK(std::equal(order.begin(), order.end(), mine.begin()));
      }
      double total = 0;
      for (const int e : mine) total += s[at(e)];
      for (int i = 0; i < k; ++i) CHECK(std::abs(weights[at(i)] - 2.5 * s[at(mine[at(i)])] / total) < 1e-5);
      const auto [one, one_weight, one_logits] = run(xs.rows(r, r + 1), 1);
      CHECK(std::equal(one.begin(), one.end(), mine.begin()));
      CHECK(same_bits(one_weight, weights));
    }
  }
}

}  // namespace
}  // namespace glm53::test
