// Mixture of experts: all formats, uneven routing, shards, and independence of rows.
#include "tests/unit/kernels/moe_oracle.h"

namespace glm53::test {
namespace {

struct Experts {
  std::vector<TestWeight> gate, up, down;
  std::vector<Weight> g, u, d;
  Experts(const std::vector<WeightFormat>& formats, int64_t inter, int64_t hidden, Random& random, bool share = false) {
    for (const WeightFormat f : formats) {
      gate.emplace_back(f, inter, hidden, random);
      up.emplace_back(f, inter, hidden, random);
      down.emplace_back(f, hidden, inter, random);
    }
    for (size_t e = 0; e < gate.size(); ++e) {
      if (share && formats[e] == WeightFormat::exl3) {
        std::copy(gate[e].suh.begin(), gate[e].suh.end(), up[e].suh.begin());
        const std::vector<float> dense = exl3::dense_matrix(up[e].w);
        up[e].dense.assign(dense.begin(), dense.end());
      }
      g.push_back(gate[e].w);
      u.push_back(up[e].w);
      d.push_back(down[e].w);
    }
  }
};

/// k different experts a row, some rows without any (padding).
Routing route(int64_t rows, int64_t k, int experts, Random& random) {
  Routing out{Ints(at(rows * k), -1), Floats(at(rows * k), 0.0f), k};
  for (int64_t r = 0; r < rows; ++r) {
    if (r % 5 == 4) continue;
    Ints ids(at(experts));
    for (int e = 0; e < experts; ++e) ids[at(e)] = e;
    for (int64_t j = 0; j < k; ++j) std::swap(ids[at(j)], ids[at(random.between(static_cast<int>(j), experts - 1))]);
    std::sort(ids.begin(), ids.begin() + k);
    for (int64_t j = 0; j < k; ++j) {
      out.index[at(r * k + j)] = ids[at(j)];
      out.weight[at(r * k + j)] = 0.2f + 0.1f * static_cast<float>(random.between(0, 9));
    }
  }
  return out;
}

Floats run_moe(Ops& ops, Floats x, Routing routing, int64_t rows, int64_t hidden, const Experts& e, float limit) {
  Floats out(at(rows * hidden), NAN);
  ops.moe({.x = tensor(x, {rows, hidden}),
           .index = tensor(routing.index, {rows, routing.k}),
           .weight = tensor(routing.weight, {rows, routing.k}),
           .gate = e.g,
           .up = e.u,
           .down = e.d,
           .limit = limit,
           .out = tensor(out, {rows, hidden})});
  return out;
}

Routing one_row(const Routing& all, int64_t r) {
  return {Ints(all.index.begin() + r * all.k, all.index.begin() + (r + 1) * all.k),
          Floats(all.weight.begin() + r * all.k, all.weight.begin() + (r + 1) * all.k), all.k};
}

void check_moe(const Experts& e, int64_t rows, int64_t k, int64_t hidden, float limit, Random& random) {
  const auto experts = static_cast<int>(e.g.size());
  const Floats x = random.normals(rows * hidden);
  const Routing routing = route(rows, k, experts, random);
  const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
  const Floats all = run_moe(*one, x, routing, rows, hidden, e, limit);
  CHECK(relative_error(all, moe_oracle(x, routing, rows, hidden, e, static_cast<double>(limit))) < 1e-5);
  CHECK(same_bits(run_moe(*three, x, routing, rows, hidden, e, limit), all));
  for (int64_t r = 0; r < rows; ++r) {
    const Floats row(x.begin() + r * hidden, x.begin() + (r + 1) * hidden);
    const auto part = std::span(all).subspan(at(r * hidden), at(hidden));
    CHECK(same_bits(run_moe(*one, row, one_row(routing, r), 1, hidden, e, limit), part));
    if (r % 5 == 4) CHECK(all_zero(part));
  }
}

TEST_CASE("moe, EXL3: separate and shared input scales, clamp that binds, rows and threads") {
  Random random(1);
  const std::vector<WeightFormat> formats(6, WeightFormat::exl3);
  for (const bool share : {false, true}) {
    const Experts e(formats, 256, 128, random, share);
    for (const float limit : {0.3f, 10.0f}) {
      for (const int64_t rows : {1, 2, 11, 23}) check_moe(e, rows, 3, 128, limit, random);
    }
  }
}

TEST_CASE("moe, plain weights with odd sizes, and formats that differ from expert to expert") {
  Random random(2);
  check_moe(Experts({WeightFormat::bf16, WeightFormat::f32, WeightFormat::bf16}, 37, 21, random), 13, 2, 21, 0.5f,
            random);
  check_moe(Experts({WeightFormat::bf16, WeightFormat::exl3, WeightFormat::f32, WeightFormat::exl3}, 128, 128, random),
            14, 3, 128, 0.5f, random);
}

TEST_CASE("moe: everything on one expert, more rows than a block") {
  Random random(3);
  const Experts e({WeightFormat::exl3, WeightFormat::exl3}, 128, 128, random);
  const int64_t rows = 250;
  const Floats x = random.normals(rows * 128);
  const Routing routing{Ints(at(rows), 1), random.normals(rows), 1};
  const auto ops = make_cpu_ops(3);
  const Floats all = run_moe(*ops, x, routing, rows, 128, e, 10.0f);
  CHECK(relative_error(all, moe_oracle(x, routing, rows, 128, e, 10.0)) < 1e-5);
  for (const int64_t r : {int64_t{0}, int64_t{239}, int64_t{240}, rows - 1}) {
    const Floats row(x.begin() + r * 128, x.begin() + (r + 1) * 128);
    CHECK(
        same_bits(run_moe(*ops, row, one_row(routing, r), 1, 128, e, 10.0f), std::span(all).subspan(at(r * 128), 128)));
  }
}

TEST_CASE("moe: shards of every expert add up to the whole") {
  Random random(4);
  const Experts whole(std::vector<WeightFormat>(3, WeightFormat::exl3), 256, 128, random);
  const Floats x = random.normals(4 * 128);
  const Routing routing = route(4, 2, 3, random);
  const auto ops = make_cpu_ops(2);
  Floats sum(4 * 128, 0.0f);
  for (int64_t rank = 0; rank < 2; ++rank) {
    Experts part = whole.g.empty() ? Experts({}, 0, 0, random)
                                   : Experts(std::vector<WeightFormat>(3, WeightFormat::exl3), 128, 128, random);
    std::vector<std::vector<uint16_t>> codes;
    for (size_t id = 0; id < 3; ++id) {
      for (const auto& [from, to] : {std::pair{&whole.g[id], &part.g[id]}, std::pair{&whole.u[id], &part.u[id]}}) {
        std::vector<uint16_t> slice;
        for (int64_t tk = 0; tk < 8; ++tk) {
          const auto* strip = from->codes.as<const uint16_t>() + (tk * 16 + rank * 8) * 64;
          slice.insert(slice.end(), strip, strip + 8 * 64);
        }
        codes.push_back(std::move(slice));
        to->codes = Tensor::of(codes.back().data(), Dtype::i16, {8, 8, 64});
        to->suh = from->suh;
        to->svh = from->svh.columns(rank * 128, rank * 128 + 128);
      }
      part.d[id].codes = whole.d[id].codes.rows(rank * 8, rank * 8 + 8);
      part.d[id].suh = whole.d[id].suh.columns(rank * 128, rank * 128 + 128);
      part.d[id].svh = whole.d[id].svh;
    }
    const Floats y = run_moe(*ops, x, routing, 4, 128, part, 0.5f);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += y[i];
  }
  const Floats want = run_moe(*ops, x, routing, 4, 128, whole, 0.5f);
  CHECK(relative_error(sum, widen(want)) < 2e-6);
}

TEST_CASE("moe: nothing routed gives zeros, bad ids are refused") {
  Random random(5);
  const Experts e({WeightFormat::bf16}, 8, 16, random);
  const auto ops = make_cpu_ops(2);
  CHECK(all_zero(run_moe(*ops, Floats(32, 1.0f), {Ints(4, -1), Floats(4, 1.0f), 2}, 2, 16, e, 1.0f)));
  CHECK(run_moe(*ops, {}, {{}, {}, 2}, 0, 16, e, 1.0f).empty());
  CHECK_THROWS_AS(run_moe(*ops, Floats(16, 1.0f), {{1}, {1.0f}, 1}, 1, 16, e, 1.0f), Error);
  CHECK_THROWS_AS(run_moe(*ops, Floats(16, 1.0f), {{-2}, {1.0f}, 1}, 1, 16, e, 1.0f), Error);
}

}  // namespace
}  // namespace glm53::test
