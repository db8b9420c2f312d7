// linear: every format, odd shapes, views, and the promise that rows and threads change no bit.
#include "kernels/cpu/hot.h"
#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

/// Runs linear on x [rows][in] and returns [rows][out]; the output starts as NaN.
Floats run_linear(Ops& ops, const Weight& w, Floats x, int64_t rows) {
  Floats y(at(rows * w.out), NAN);
  ops.linear({.x = tensor(x, {rows, w.in}), .w = &w, .y = tensor(y, {rows, w.out})});
  return y;
}

Floats part(const Floats& v, int64_t begin, int64_t n) {
  return {v.begin() + begin, v.begin() + begin + n};
}

void check_all_row_counts(const TestWeight& w, Random& random) {
  const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
  const int64_t in = w.w.in, out = w.w.out, most = 17;
  const Floats x = random.normals(most * in);
  const Doubles want = product(w, widen(x), most);
  Floats single;
  for (int64_t r = 0; r < most; ++r) {
    const Floats y = run_linear(*one, w.w, part(x, r * in, in), 1);
    single.insert(single.end(), y.begin(), y.end());
  }
  CHECK(relative_error(single, want) < 5e-6);
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 17}) {
    for (const auto& ops : {one.get(), three.get()}) {
      CHECK(same_bits(run_linear(*ops, w.w, part(x, 0, rows * in), rows), part(single, 0, rows * out)));
    }
  }
}

TEST_CASE("linear, f32 and bf16: oracle, rows equal single rows, threads") {
  Random random(1);
  for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16}) {
    for (const auto& [out, in] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {1, 7}, {3, 8}, {4, 9}, {5, 16}, {8, 64}, {13, 511}, {24, 520}, {31, 1031}, {96, 128}}) {
      CAPTURE(out);
      CAPTURE(in);
      check_all_row_counts(TestWeight(format, out, in, random), random);
    }
  }
}

TEST_CASE("linear, EXL3: every width and codebook, rows equal single rows, threads") {
  Random random(2);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Codebook codebook : {Codebook::three_inst, Codebook::mcg, Codebook::mul1}) {
      check_all_row_counts(TestWeight(WeightFormat::exl3, 128, 128, random, bits, codebook), random);
    }
  }
  check_all_row_counts(TestWeight(WeightFormat::exl3, 384, 256, random), random);
}

TEST_CASE("linear with more rows than a block") {
  Random random(3);
  const int64_t rows = 2 * cpu::kDenseRows + 5;
  for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16, WeightFormat::exl3}) {
    const bool packed = format == WeightFormat::exl3;
    const TestWeight w(format, packed ? 128 : 11, packed ? 128 : 37, random);
    const Floats x = random.normals(rows * w.w.in);
    const auto one = make_cpu_ops(1), three = make_cpu_ops(3);
    const Floats y = run_linear(*one, w.w, x, rows);
    CHECK(relative_error(y, product(w, widen(x), rows)) < 5e-6);
    CHECK(same_bits(run_linear(*three, w.w, x, rows), y));
    for (const int64_t r : {int64_t{0}, cpu::kDenseRows - 1, cpu::kDenseRows, rows - 1}) {
      CHECK(same_bits(run_linear(*one, w.w, part(x, r * w.w.in, w.w.in), 1), part(y, r * w.w.out, w.w.out)));
    }
  }
}

TEST_CASE("linear on column views, with and without beta, touches only its columns") {
  Random random(4);
  for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16, WeightFormat::exl3}) {
    const bool packed = format == WeightFormat::exl3;
    const TestWeight w(format, packed ? 128 : 10, packed ? 128 : 21, random);
    const int64_t rows = 9, in = w.w.in, out = w.w.out;
    Floats x = random.normals(rows * (in + 5)), y = random.normals(rows * (out + 3)), before = y;
    const auto ops = make_cpu_ops(2);
    ops->linear({.x = tensor(x, {rows, in + 5}).columns(2, in + 2),
                 .w = &w.w,
                 .y = tensor(y, {rows, out + 3}).columns(1, out + 1),
                 .beta = 0.5f});
    Doubles inner;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < in; ++i) inner.push_back(static_cast<double>(x[at(r * (in + 5) + 2 + i)]));
    }
    Doubles want = product(w, inner, rows);
    Floats got;
    for (int64_t r = 0; r < rows; ++r) {
      CHECK(y[at(r * (out + 3))] == before[at(r * (out + 3))]);
      CHECK(y[at((r + 1) * (out + 3) - 1)] == before[at((r + 1) * (out + 3) - 1)]);
      for (int64_t o = 0; o < out; ++o) {
        want[at(r * out + o)] += 0.5 * static_cast<double>(before[at(r * (out + 3) + 1 + o)]);
        got.push_back(y[at(r * (out + 3) + 1 + o)]);
      }
    }
    CHECK(relative_error(got, want) < 5e-6);
  }
}

TEST_CASE("linear with no rows or no outputs writes nothing; an empty inner dimension gives zeros") {
  Random random(5);
  const auto ops = make_cpu_ops(2);
  const TestWeight w(WeightFormat::bf16, 4, 8, random);
  CHECK(run_linear(*ops, w.w, {}, 0).empty());
  const TestWeight none(WeightFormat::f32, 0, 8, random);
  CHECK(run_linear(*ops, none.w, random.normals(24), 3).empty());
  const TestWeight hollow(WeightFormat::bf16, 3, 0, random);
  const Floats zeros = run_linear(*ops, hollow.w, {}, 9);
  CHECK(zeros.size() == 27);
  CHECK(all_zero(zeros));
}

TEST_CASE("linear refuses wrong shapes and formats it lacks") {
  Random random(6);
  const auto ops = make_cpu_ops(1);
  TestWeight w(WeightFormat::bf16, 4, 8, random);
  Floats x(16), y(8);
  CHECK_THROWS_AS(ops->linear({.x = tensor(x, {2, 7}), .w = &w.w, .y = tensor(y, {2, 4})}), Error);
  CHECK_THROWS_AS(ops->linear({.x = tensor(x, {2, 8}), .w = &w.w, .y = tensor(y, {1, 4})}), Error);
  w.w.format = WeightFormat::fp8_g128;
  try {
    ops->linear({.x = tensor(x, {2, 8}), .w = &w.w, .y = tensor(y, {2, 4})});
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.code() == Code::unavailable);
  }
  TestWeight packed(WeightFormat::exl3, 128, 128, random);
  Floats big(128), out(128);
  packed.w.bits = 3;
  CHECK_THROWS_AS(ops->linear({.x = tensor(big, {1, 128}), .w = &packed.w, .y = tensor(out, {1, 128})}), Error);
}

TEST_CASE("every hot variant gives the oracle's sums and keeps rows independent") {
  Random random(7);
  for (const cpu::HotKernels* hot : cpu::hot_variants()) {
    CAPTURE(std::string(hot->name));
    for (const bool bf16 : {false, true}) {
      const TestWeight w(bf16 ? WeightFormat::bf16 : WeightFormat::f32, 21, 1043, random);
      const int64_t rows = 14, in = w.w.in, out = w.w.out;
      const Floats x = random.normals(rows * in);
      Floats all(at(rows * out), NAN), single = all, scratch(cpu::dense_scratch(rows));
      cpu::DenseJob job{.w = w.w.codes.data,
                        .bf16 = bf16,
                        .in = in,
                        .out_begin = 0,
                        .out_end = out,
                        .x = x.data(),
                        .x_stride = in,
                        .rows = rows,
                        .y = all.data(),
                        .y_stride = out,
                        .beta = 0,
                        .scratch = scratch.data()};
      hot->dense(job);
      job.rows = 1;
      for (int64_t r = 0; r < rows; ++r) {
        job.x = x.data() + r * in;
        job.y = single.data() + r * out;
        hot->dense(job);
      }
      CHECK(same_bits(all, single));
      CHECK(relative_error(all, product(w, widen(x), rows)) < 5e-6);
    }
    Floats v = random.normals(256), plain = v;
    hot->hadamard(v.data(), 256);
    exl3::hadamard128(plain.data());
    exl3::hadamard128(plain.data() + 128);
    CHECK(same_bits(v, plain));
    double squares = 0;
    for (size_t i = 0; i < 203; ++i) squares += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    CHECK(static_cast<double>(hot->square_sum(v.data(), 203)) == doctest::Approx(squares).epsilon(1e-6));
  }
}

TEST_CASE("the Hadamard transform is the Sylvester matrix over the root of 128") {
  for (int j = 0; j < 128; ++j) {
    std::vector<float> e(128, 0.0f);
    e[static_cast<size_t>(j)] = 1;
    exl3::hadamard128(e.data());
    int wrong = 0;
    for (unsigned i = 0; i < 128; ++i) {
      const float sign = std::popcount(i & static_cast<unsigned>(j)) % 2 == 0 ? 1.0f : -1.0f;
      wrong += e[i] != sign * 0.08838834764831845f;
    }
    CHECK(wrong == 0);
  }
}

}  // namespace
}  // namespace glm53::test
