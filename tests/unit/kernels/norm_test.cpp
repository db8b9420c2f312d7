// rms_norm, swiglu, embed, add.
#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

double silu(double x) {
  return x / (1 + std::exp(-x));
}

TEST_CASE("rms_norm: oracle, views, in place, rows and threads") {
  Random random(1);
  for (const int64_t n : {1, 7, 8, 13, 256, 1031}) {
    for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
      TestWeight weight(format, n, 1, random);
      const int64_t rows = 5;
      Floats x = random.normals(rows * (n + 2), 3.0f);
      Floats y(at(rows * n), NAN);
      const Tensor in = tensor(x, {rows, n + 2}).columns(1, n + 1);
      Doubles want(y.size());
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < n; ++i) squares += std::pow(static_cast<double>(x[at(r * (n + 2) + 1 + i)]), 2);
        for (int64_t i = 0; i < n; ++i) {
          want[at(r * n + i)] = static_cast<double>(x[at(r * (n + 2) + 1 + i)]) /
                                std::sqrt(squares / static_cast<double>(n) + 1e-5) * weight.dense[at(i)];
        }
      }
      const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
      one->rms_norm({.x = in, .weight = &weight.w, .eps = 1e-5f, .y = tensor(y, {rows, n})});
      CHECK(relative_error(y, want) < 2e-6);
      for (int64_t r = 0; r < rows; ++r) {
        Floats single(at(n), NAN);
        one->rms_norm({.x = in.rows(r, r + 1), .weight = &weight.w, .eps = 1e-5f, .y = tensor(single, {1, n})});
        CHECK(same_bits(single, std::span(y).subspan(at(r * n), at(n))));
      }
      three->rms_norm({.x = in, .weight = &weight.w, .eps = 1e-5f, .y = in});
      for (int64_t r = 0; r < rows; ++r) {
        CHECK(same_bits(std::span(x).subspan(at(r * (n + 2) + 1), at(n)), std::span(y).subspan(at(r * n), at(n))));
      }
    }
  }
}

TEST_CASE("rms_norm without a weight; a zero row stays zero") {
  const auto ops = make_cpu_ops(1);
  Floats x = {3, 4, 0, 0}, y(4, NAN);
  ops->rms_norm({.x = tensor(x, {2, 2}), .weight = nullptr, .eps = 0.5f, .y = tensor(y, {2, 2})});
  CHECK(y[0] == doctest::Approx(3 / std::sqrt(13.0)));
  CHECK(y[1] == doctest::Approx(4 / std::sqrt(13.0)));
  CHECK(y[2] == 0);
  const Weight none;
  ops->rms_norm({.x = tensor(x, {2, 2}), .weight = &none, .eps = 0.5f, .y = tensor(y, {2, 2})});
  CHECK(y[0] == doctest::Approx(3 / std::sqrt(13.0)));
}

TEST_CASE("swiglu clamps before the activation, gate from above only") {
  Random random(2);
  const int64_t rows = 7, n = 301;
  for (const float limit : {0.5f, 10.0f, INFINITY}) {
    Floats gate = random.normals(rows * n, 4.0f), up = random.normals(rows * n, 4.0f), out(gate.size(), NAN);
    gate[0] = 1e30f;
    gate[1] = -1e30f;
    up[2] = -INFINITY;
    up[3] = 1e30f;
    Doubles want;
    for (size_t i = 0; i < gate.size(); ++i) {
      const double l = static_cast<double>(limit);
      const double g = std::min(static_cast<double>(gate[i]), l), u = std::clamp(static_cast<double>(up[i]), -l, l);
      want.push_back(silu(g) * u);
    }
    if (std::isinf(limit)) {
      gate[0] = gate[1] = up[2] = up[3] = 0;
      want[0] = want[1] = want[2] = want[3] = 0;
    }
    make_cpu_ops(1)->swiglu(
        {.gate = tensor(gate, {rows, n}), .up = tensor(up, {rows, n}), .limit = limit, .out = tensor(out, {rows, n})});
    CHECK(relative_error(out, want) < 1e-6);
    Floats both(at(rows * 2 * n));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(gate.data() + r * n, n, both.data() + r * 2 * n);
      std::copy_n(up.data() + r * n, n, both.data() + r * 2 * n + n);
    }
    const Tensor t = tensor(both, {rows, 2 * n});  // gate and up of one product, result over the gate
    make_cpu_ops(3)->swiglu(
        {.gate = t.columns(0, n), .up = t.columns(n, 2 * n), .limit = limit, .out = t.columns(0, n)});
    for (int64_t r = 0; r < rows; ++r) {
      CHECK(same_bits(std::span(both).subspan(at(r * 2 * n), at(n)), std::span(out).subspan(at(r * n), at(n))));
    }
  }
}

TEST_CASE("swiglu does not hide NaN") {
  Floats gate = {NAN, 1}, up = {1, NAN}, out(2);
  make_cpu_ops(1)->swiglu(
      {.gate = tensor(gate, {1, 2}), .up = tensor(up, {1, 2}), .limit = 10, .out = tensor(out, {1, 2})});
  CHECK(std::isnan(out[0]));
  CHECK(std::isnan(out[1]));
}

TEST_CASE("embed: tokens, own embeddings, padding, bad ids") {
  Random random(3);
  for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
    const TestWeight table(format, 6, 9, random);
    Ints token = {5, -1, 0, 3, -1};
    Floats own = random.normals(5 * 9), out(5 * 9, NAN);
    Batch batch;
    batch.rows = 4;
    batch.token = tensor(token, {5});
    const auto ops = make_cpu_ops(2);
    const auto expect_row = [&](int64_t r, int64_t id) {
      for (int64_t i = 0; i < 9; ++i) CHECK(static_cast<double>(out[at(r * 9 + i)]) == table.dense[at(id * 9 + i)]);
    };
    ops->embed({.batch = &batch, .table = &table.w, .out = tensor(out, {5, 9})});
    expect_row(0, 5);
    expect_row(2, 0);
    expect_row(3, 3);
    CHECK(all_zero(std::span(out).subspan(9, 9)));
    CHECK(all_zero(std::span(out).subspan(36, 9)));
    batch.embedding = tensor(own, {5, 9});
    std::fill(out.begin(), out.end(), NAN);
    ops->embed({.batch = &batch, .table = &table.w, .out = tensor(out, {5, 9})});
    expect_row(3, 3);
    CHECK(same_bits(std::span(out).subspan(9, 9), std::span(own).subspan(9, 9)));
    CHECK(all_zero(std::span(out).subspan(36, 9)));
    for (const int32_t bad : {6, -2}) {
      token[0] = bad;
      CHECK_THROWS_AS(ops->embed({.batch = &batch, .table = &table.w, .out = tensor(out, {5, 9})}), Error);
    }
  }
}

TEST_CASE("add, contiguous and strided") {
  Random random(4);
  Floats a = random.normals(40000), b = random.normals(40000), sum(40000);
  for (size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  Floats left = a;
  make_cpu_ops(3)->add({.a = tensor(left, {200, 200}), .b = tensor(b, {200, 200})});
  CHECK(same_bits(left, sum));
  left = a;
  const auto ops = make_cpu_ops(1);
  ops->add({.a = tensor(left, {200, 200}).columns(3, 5), .b = tensor(b, {200, 200}).columns(3, 5)});
  CHECK(left[2] == a[2]);
  CHECK(left[3] == sum[3]);
  CHECK(left[204] == sum[204]);
  CHECK(left[205] == a[205]);
  CHECK_THROWS_AS(ops->add({.a = tensor(left, {200, 200}), .b = tensor(b, {100, 400})}), Error);
}

}  // namespace
}  // namespace glm53::test
