// Router: choice, groups, ties, weights, padding.
#include <numeric>
#include <set>

#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

struct Setup {
  int groups = 1, top_groups = 1, k = 1;
  bool normalize = true;
  float scale = 1;
};

struct Choice {
  Ints index;
  Floats weight, logits;
};

Choice run_router(Ops& ops, Floats x, int64_t rows, const Weight& w, const Weight& bias, const Setup& s, int real) {
  Choice c{Ints(at(rows * s.k), -7), Floats(at(rows * s.k), NAN), Floats(at(rows * w.out), NAN)};
  ops.router({.x = tensor(x, {rows, w.in}),
              .w = &w,
              .bias = &bias,
              .groups = s.groups,
              .top_groups = s.top_groups,
              .k = s.k,
              .normalize = s.normalize,
              .scale = s.scale,
              .real_rows = real,
              .index = tensor(c.index, {rows, s.k}),
              .weight = tensor(c.weight, {rows, s.k}),
              .logits = tensor(c.logits, {rows, w.out})});
  return c;
}

/// Model §6 from given logits, by sorting.
std::pair<Ints, Doubles> oracle(std::span<const float> logits, std::span<const float> bias, const Setup& s) {
  const auto n = static_cast<int>(logits.size());
  Doubles score(logits.size()), biased(logits.size());
  for (size_t e = 0; e < logits.size(); ++e) {
    score[e] = 1 / (1 + std::exp(-static_cast<double>(logits[e])));
    biased[e] = score[e] + static_cast<double>(bias[e]);
  }
  const auto order = [](const Doubles& v) {
    Ints ids(v.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return v[at(a)] > v[at(b)]; });
    return ids;
  };
  if (s.groups > 1) {
    const int size = n / s.groups;
    Doubles of_group;
    for (int g = 0; g < s.groups; ++g) {
      Doubles members(biased.begin() + g * size, biased.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      of_group.push_back(size == 1 ? members[0] : members[0] + members[1]);
    }
    const Ints best = order(of_group);
    const std::set<int> kept(best.begin(), best.begin() + s.top_groups);
    for (int e = 0; e < n; ++e) {
      if (kept.count(e / size) == 0) biased[at(e)] = -INFINITY;
    }
  }
  Ints ids = order(biased);
  ids.resize(at(s.k));
  std::sort(ids.begin(), ids.end());
  double total = 1e-20;
  for (const int e : ids) total += score[at(e)];
  Doubles weight;
  for (const int e : ids) weight.push_back(score[at(e)] / (s.normalize ? total : 1) * static_cast<double>(s.scale));
  return {ids, weight};
}

TEST_CASE("router: oracle, rows, threads, padding") {
  Random random(1);
  const Setup setups[] = {{1, 1, 8, true, 2.5f},  {1, 1, 1, false, 1.0f}, {4, 2, 6, true, 2.5f},
                          {6, 1, 2, false, 3.0f}, {24, 5, 5, true, 1.0f}, {1, 1, 24, true, 1.0f}};
  for (const Setup& s : setups) {
    for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
      const TestWeight w(format, 24, 40, random);
      TestWeight bias(WeightFormat::f32, 24, 1, random);
      for (float& b : bias.f32) b = b * 0.3f - 0.7f;  // biased scores fall on both sides of zero
      const int64_t rows = 9;
      const int real = 7;
      const Floats x = random.normals(rows * 40, 2.0f);
      const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
      const Choice all = run_router(*one, x, rows, w.w, bias.w, s, real);
      const Choice threaded = run_router(*three, x, rows, w.w, bias.w, s, real);
      CHECK(all.index == threaded.index);
      CHECK(same_bits(all.weight, threaded.weight));
      CHECK(relative_error(all.logits, product(w, widen(x), rows)) < 3e-6);
      for (int64_t r = 0; r < rows; ++r) {
        const Ints index(all.index.begin() + r * s.k, all.index.begin() + (r + 1) * s.k);
        const auto weight = std::span(all.weight).subspan(at(r * s.k), at(s.k));
        if (r >= real) {
          CHECK(index == Ints(at(s.k), -1));
          CHECK(all_zero(weight));
          continue;
        }
        const auto [ids, weights] = oracle(std::span(all.logits).subspan(at(r * 24), 24), bias.f32, s);
        CHECK(index == ids);
        CHECK(relative_error(weight, weights) < 2e-6);
        const Floats row(x.begin() + r * 40, x.begin() + (r + 1) * 40);
        const Choice single = run_router(*one, row, 1, w.w, bias.w, s, 1);
        CHECK(single.index == index);
        CHECK(same_bits(single.weight, weight));
      }
    }
  }
}

TEST_CASE("router: ties go to the lower id, a masked group never wins over a negative score") {
  const auto ops = make_cpu_ops(1);
  Floats w(8, 0.0f), x = {1.0f}, bias(8, 0.0f);
  const Weight weight = plain(w, 8, 1);
  Weight b = plain(bias, 8, 1);
  CHECK(run_router(*ops, x, 1, weight, b, {1, 1, 3, true, 1.0f}, 1).index == Ints{0, 1, 2});
  CHECK(run_router(*ops, x, 1, weight, b, {4, 2, 3, true, 1.0f}, 1).index == Ints{0, 1, 2});
  bias = {-3, -3, -3, -3, -2, -2.5f, -3, -3};  // all biased scores negative; group 2 of 4 is the best
  CHECK(run_router(*ops, x, 1, weight, b, {4, 1, 2, true, 1.0f}, 1).index == Ints{4, 5});
  bias = {0, 0, 5, -9, 2, 2, 0, 0};  // the sum of two decides, not the best one
  CHECK(run_router(*ops, x, 1, weight, b, {4, 1, 1, true, 1.0f}, 1).index == Ints{4});
}

TEST_CASE("router: hostile values still give k different experts") {
  const auto ops = make_cpu_ops(1);
  Floats w(6, 1.0f), bias(6, 0.0f);
  const Weight weight = plain(w, 6, 1), b = plain(bias, 6, 1);
  for (const float v : {static_cast<float>(NAN), static_cast<float>(INFINITY), -static_cast<float>(INFINITY)}) {
    const Choice c = run_router(*ops, {v}, 1, weight, b, {3, 1, 4, true, 1.0f}, 1);
    const std::set<int> different(c.index.begin(), c.index.end());
    CHECK(different.size() == 4);
    CHECK(*different.begin() >= 0);
    CHECK(*different.rbegin() < 6);
  }
  CHECK_THROWS_AS(run_router(*ops, {1}, 1, weight, b, {1, 1, 7, true, 1.0f}, 1), Error);
  CHECK_THROWS_AS(run_router(*ops, {1}, 1, weight, b, {4, 1, 1, true, 1.0f}, 1), Error);
}

}  // namespace
}  // namespace glm53::test
