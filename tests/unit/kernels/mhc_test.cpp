// Hyper-connections against model §3 written out in f64.
#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

struct Site {
  TestWeight fn, base, scale, norm;
  Site(WeightFormat format, int64_t n, int64_t hidden, Random& random)
      : fn(format, (2 + n) * n, n * hidden, random),
        base(WeightFormat::f32, (2 + n) * n, 1, random),
        scale(WeightFormat::f32, 3, 1, random),
        norm(format, hidden, 1, random) {
    for (double& v : scale.dense) v = static_cast<double>(static_cast<float>(std::fabs(v) + 0.5));
    for (size_t i = 0; i < 3; ++i) scale.f32[i] = static_cast<float>(scale.dense[i]);
  }
  MhcSite site() const { return {&fn.w, &base.w, &scale.w}; }
};

struct Result {
  Floats post, comb, u;
};

Result run_pre(Ops& ops, Floats x, int64_t rows, int64_t n, int64_t hidden, const Site& s, bool norm, int sinkhorn) {
  Result out{Floats(at(rows * n), NAN), Floats(at(rows * n * n), NAN), Floats(at(rows * hidden), NAN)};
  ops.mhc_pre({.streams = tensor(x, {rows, n, hidden}),
               .site = s.site(),
               .norm = norm ? &s.norm.w : nullptr,
               .rms_eps = 1e-5f,
               .hc_eps = 1e-6f,
               .sinkhorn = sinkhorn,
               .post = tensor(out.post, {rows, n}),
               .comb = tensor(out.comb, {rows, n, n}),
               .u = tensor(out.u, {rows, hidden})});
  return out;
}

struct Oracle {
  Doubles post, comb, u;
};

double sigma(double v) {
  return 1 / (1 + std::exp(-v));
}

Oracle oracle_row(std::span<const float> x, int64_t n, int64_t hidden, const Site& s, bool norm, int sinkhorn) {
  double squares = 0;
  for (const float v : x) squares += static_cast<double>(v) * static_cast<double>(v);
  const double rms = std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
  Doubles m(at((2 + n) * n));
  for (size_t i = 0; i < m.size(); ++i) {
    for (size_t k = 0; k < x.size(); ++k) m[i] += s.fn.dense[i * x.size() + k] * static_cast<double>(x[k]) / rms;
  }
  const auto value = [&](int64_t i, size_t part) { return m[at(i)] * s.scale.dense[part] + s.base.dense[at(i)]; };
  Oracle o{Doubles(at(n)), Doubles(at(n * n)), Doubles(at(hidden))};
  const auto c = [&](int64_t i, int64_t j) -> double& { return o.comb[at(i * n + j)]; };
  for (int64_t j = 0; j < n; ++j) o.post[at(j)] = 2 * sigma(value(n + j, 1));
  for (int64_t i = 0; i < n; ++i) {
    double total = 0;
    for (int64_t j = 0; j < n; ++j) total += std::exp(value(2 * n + i * n + j, 2));
    for (int64_t j = 0; j < n; ++j) c(i, j) = std::exp(value(2 * n + i * n + j, 2)) / total + 1e-6;
  }
  const auto columns = [&] {
    for (int64_t j = 0; j < n; ++j) {
      double total = 1e-6;
      for (int64_t i = 0; i < n; ++i) total += c(i, j);
      for (int64_t i = 0; i < n; ++i) c(i, j) /= total;
    }
  };
  const auto rows = [&] {
    for (int64_t i = 0; i < n; ++i) {
      double total = 1e-6;
      for (int64_t j = 0; j < n; ++j) total += c(i, j);
      for (int64_t j = 0; j < n; ++j) c(i, j) /= total;
    }
  };
  columns();
  for (int step = 1; step < sinkhorn; ++step) {
    rows();
    columns();
  }
  for (int64_t q = 0; q < n; ++q) {
    for (int64_t d = 0; d < hidden; ++d)
      o.u[at(d)] += (sigma(value(q, 0)) + 1e-6) * static_cast<double>(x[at(q * hidden + d)]);
  }
  if (!norm) return o;
  double mean = 0;
  for (const double v : o.u) mean += v * v / static_cast<double>(hidden);
  for (int64_t d = 0; d < hidden; ++d) o.u[at(d)] *= s.norm.dense[at(d)] / std::sqrt(mean + 1e-5);
  return o;
}

TEST_CASE("mhc_pre: oracle for several sizes, rows and threads") {
  Random random(1);
  for (const auto& [n, hidden] : std::vector<std::pair<int64_t, int64_t>>{{4, 64}, {4, 33}, {2, 8}, {1, 5}, {3, 130}}) {
    for (const int sinkhorn : {1, 2, 20}) {
      for (const bool norm : {false, true}) {
        const Site s(norm ? WeightFormat::bf16 : WeightFormat::f32, n, hidden, random);
        const int64_t rows = 8;
        const Floats x = random.normals(rows * n * hidden, 2.0f);
        const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
        const Result all = run_pre(*one, x, rows, n, hidden, s, norm, sinkhorn);
        const Result threaded = run_pre(*three, x, rows, n, hidden, s, norm, sinkhorn);
        CHECK(same_bits(all.u, threaded.u));
        CHECK(same_bits(all.post, threaded.post));
        CHECK(same_bits(all.comb, threaded.comb));
        for (int64_t r = 0; r < rows; ++r) {
          const Floats row(x.begin() + r * n * hidden, x.begin() + (r + 1) * n * hidden);
          const Result single = run_pre(*one, row, 1, n, hidden, s, norm, sinkhorn);
          CHECK(same_bits(single.u, std::span(all.u).subspan(at(r * hidden), at(hidden))));
          CHECK(same_bits(single.post, std::span(all.post).subspan(at(r * n), at(n))));
          CHECK(same_bits(single.comb, std::span(all.comb).subspan(at(r * n * n), at(n * n))));
          const Oracle want = oracle_row(row, n, hidden, s, norm, sinkhorn);
          CHECK(relative_error(single.u, want.u) < 1e-5);
          CHECK(relative_error(single.post, want.post) < 3e-6);
          CHECK(relative_error(single.comb, want.comb) < 3e-6);
        }
      }
    }
  }
}

/// X[j] = post[j]·y + Σ_i comb[i][j]·X[i] in f64.
Doubles oracle_post(const Floats& x, const Floats& y, const Floats& post, const Floats& comb, int64_t rows, int64_t n,
                    int64_t hidden) {
  Doubles next(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t d = 0; d < hidden; ++d) {
        double v = static_cast<double>(post[at(r * n + j)]) * static_cast<double>(y[at(r * hidden + d)]);
        for (int64_t i = 0; i < n; ++i) {
          v +=
              static_cast<double>(comb[at((r * n + i) * n + j)]) * static_cast<double>(x[at((r * n + i) * hidden + d)]);
        }
        next[at((r * n + j) * hidden + d)] = v;
      }
    }
  }
  return next;
}

TEST_CASE("mhc_post uses the transposed comb and updates all streams at once; mhc_post_pre is both") {
  Random random(2);
  for (const auto& [n, hidden] : std::vector<std::pair<int64_t, int64_t>>{{4, 300}, {4, 7}, {3, 128}, {1, 9}}) {
    const int64_t rows = 6;
    const Site s(WeightFormat::bf16, n, hidden, random);
    const Floats x = random.normals(rows * n * hidden);
    Floats y = random.normals(rows * hidden), post = random.normals(rows * n), comb = random.normals(rows * n * n);
    const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
    Floats apart = x, threaded = x, fused = x;
    const auto args = [&](Floats& streams, Floats& p, Floats& c) {
      return MhcPostArgs{tensor(streams, {rows, n, hidden}), tensor(y, {rows, hidden}), tensor(p, {rows, n}),
                         tensor(c, {rows, n, n})};
    };
    one->mhc_post(args(apart, post, comb));
    three->mhc_post(args(threaded, post, comb));
    CHECK(same_bits(apart, threaded));
    CHECK(relative_error(apart, oracle_post(x, y, post, comb, rows, n, hidden)) < 2e-6);
    for (int64_t r = 0; r < rows; ++r) {
      Floats single(x.begin() + r * n * hidden, x.begin() + (r + 1) * n * hidden);
      one->mhc_post({tensor(single, {1, n, hidden}), tensor(y, {rows, hidden}).rows(r, r + 1),
                     tensor(post, {rows, n}).rows(r, r + 1), tensor(comb, {rows, n, n}).rows(r, r + 1)});
      CHECK(same_bits(single, std::span(apart).subspan(at(r * n * hidden), at(n * hidden))));
    }
    const Result want = run_pre(*one, apart, rows, n, hidden, s, true, 20);
    Floats u(at(rows * hidden), NAN);
    three->mhc_post_pre({.post = args(fused, post, comb),
                         .pre = {.streams = tensor(fused, {rows, n, hidden}),
                                 .site = s.site(),
                                 .norm = &s.norm.w,
                                 .rms_eps = 1e-5f,
                                 .hc_eps = 1e-6f,
                                 .sinkhorn = 20,
                                 .post = tensor(post, {rows, n}),
                                 .comb = tensor(comb, {rows, n, n}),
                                 .u = tensor(u, {rows, hidden})}});
    CHECK(same_bits(fused, apart));
    CHECK(same_bits(u, want.u));
    CHECK(same_bits(post, want.post));
    CHECK(same_bits(comb, want.comb));
  }
}

TEST_CASE("stream_mean divides by the number of streams; zero rows and zero streams of values stay finite") {
  Random random(3);
  Floats x = random.normals(3 * 4 * 10), out(30, NAN);
  const auto ops = make_cpu_ops(2);
  ops->stream_mean({.streams = tensor(x, {3, 4, 10}), .out = tensor(out, {3, 10})});
  Doubles want(30);
  for (size_t i = 0; i < x.size(); ++i) want[i / 40 * 10 + i % 10] += static_cast<double>(x[i]) / 4;
  CHECK(relative_error(out, want) < 1e-6);
  const Site s(WeightFormat::f32, 4, 16, random);
  const Result zero = run_pre(*ops, Floats(64, 0.0f), 1, 4, 16, s, true, 20);
  CHECK(all_zero(zero.u));
  for (const float v : zero.comb) CHECK(std::isfinite(v));
  CHECK(run_pre(*ops, {}, 0, 4, 16, s, true, 20).u.empty());
}

}  // namespace
}  // namespace glm53::test
