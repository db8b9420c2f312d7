// The quantised formats: what codes mean, how large the errors are, what is refused; linear with such weights.
#include <algorithm>
#include <array>
#include <set>

#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

constexpr std::array kFormats = {WeightFormat::fp8_row, WeightFormat::int4_g32};

struct Quantised {
  std::vector<std::byte> codes, scales;
  Weight w;
  Floats back;

  Quantised(WeightFormat f, const Floats& values, int64_t rows)
      : codes(at(code_bytes(f, rows, static_cast<int64_t>(values.size()) / rows))),
        scales(at(scale_bytes(f, rows, static_cast<int64_t>(values.size()) / rows))),
        back(values.size(), NAN) {
    const int64_t in = static_cast<int64_t>(values.size()) / rows;
    quantise_rows(f, values.data(), rows, in, codes.data(), scales.data());
    w = quantised_weight(f, rows, in, codes.data(), scales.data(), Place::host);
    for (int64_t r = 0; r < rows; ++r) dequantise_row(w, r, back.data() + r * in);
  }
};

double relative_rms(const Floats& a, const Floats& b) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    apart += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    size += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(apart / size);
}

int significant_bits(float v) {
  int exponent = 0;
  float m = std::fabs(std::frexp(v, &exponent));
  int bits = 0;
  for (; m != 0; ++bits) m = 2 * m - std::floor(2 * m);
  return bits;
}

TEST_CASE("code_place is a permutation inside 32 inputs") {
  for (const WeightFormat f : kFormats) {
    std::set<int64_t> places;
    for (int64_t i = 64; i < 96; ++i) places.insert(code_place(f, i));
    CHECK(places.size() == 32);
    CHECK(*places.begin() == 64);
    CHECK(*places.rbegin() == 95);
  }
  // As the header spells it: input 8·3 + 2·1 + 1.
  CHECK(code_place(WeightFormat::fp8_row, 27) == 8 + 4 + 1 + 2);
  CHECK(code_place(WeightFormat::int4_g32, 27) == 8 + 3 + 4);
}

TEST_CASE("fp8_row: powers of two as scales, errors within a sixteenth, values of bf16") {
  Random random(1);
  const int64_t rows = 40, in = 256;
  Floats v = random.normals(rows * in, 0.02F);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < in; ++i) v[at(r * in + i)] *= std::ldexp(1.0F, static_cast<int>(r) - 20);
  }
  const Quantised q(WeightFormat::fp8_row, v, rows);
  CHECK(relative_rms(q.back, v) < 0.028);
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = q.w.scales.as<const float>()[r];
    CHECK(significant_bits(scale) == 1);
    float largest = 0;
    for (int64_t i = 0; i < in; ++i) {
      const float x = v[at(r * in + i)], y = q.back[at(r * in + i)];
      largest = std::max(largest, std::fabs(x));
      CHECK(std::fabs(y - x) <= std::max(std::fabs(x) / 16, scale / 1024));
      CHECK(y == bf16_to_f32(f32_to_bf16(y)));
    }
    CHECK(largest / scale <= 448);
    CHECK(largest / scale > 224);
  }
}

TEST_CASE("int4_g32: scales of five bits, errors of a scale, values of bf16, extremes of either sign") {
  Random random(2);
  const int64_t rows = 40, in = 256;
  Floats v = random.normals(rows * in, 0.02F);
  for (int64_t r = 0; r < rows; ++r) v[at(r * in + 40)] = (r % 2 == 0 ? 1.0F : -1.0F) * 0.3F;  // a group's extreme
  const Quantised q(WeightFormat::int4_g32, v, rows);
  for (int64_t g = 0; g < rows * in / 32; ++g) {
    const float scale = bf16_to_f32(q.w.scales.as<const uint16_t>()[g]);
    CHECK(significant_bits(scale) <= 5);
    float largest = 0;
    for (int64_t i = 32 * g; i < 32 * g + 32; ++i) largest = std::max(largest, std::fabs(v[at(i)]));
    for (int64_t i = 32 * g; i < 32 * g + 32; ++i) {
      const float x = v[at(i)], y = q.back[at(i)];
      // Only what lies beyond the outermost codes may be off by more than half a scale.
      const float reach = (x / scale < 0 ? 8.0F : 7.0F) * std::fabs(scale);
      CHECK(std::fabs(y - x) <= std::max(0.501F * std::fabs(scale), std::fabs(x) - reach + 1e-6F * largest));
      CHECK(y == bf16_to_f32(f32_to_bf16(y)));
    }
  }
  Floats normal = random.normals(rows * in);
  CHECK(relative_rms(Quantised(WeightFormat::int4_g32, normal, rows).back, normal) < 0.083);
}

TEST_CASE("quantising again changes nothing; rows do not depend on one another") {
  Random random(3);
  for (const WeightFormat f : kFormats) {
    const Floats v = random.normals(6 * 96);
    const Quantised q(f, v, 6);
    for (int64_t r = 0; r < 6; ++r) {
      const Quantised alone(f, Floats(v.begin() + r * 96, v.begin() + r * 96 + 96), 1);
      CHECK(same_bits(alone.back, std::span(q.back).subspan(at(r * 96), 96)));
    }
    if (f == WeightFormat::fp8_row) CHECK(same_bits(Quantised(f, q.back, 6).back, q.back));
  }
}

TEST_CASE("zeros, tiny and huge values; what is refused") {
  for (const WeightFormat f : kFormats) {
    CHECK(all_zero(Quantised(f, Floats(64), 2).back));
    Floats v(64, 0x1p-140F);
    v[3] = 0x1p-149F;
    CHECK(all_zero(Quantised(f, v, 2).back));
    std::fill(v.begin(), v.end(), -0x1p+120F);
    CHECK(same_bits(Quantised(f, v, 2).back, v));
    for (const float bad : {NAN, INFINITY, -0x1p+121F}) {
      v[40] = bad;
      try {
        const Quantised q(f, v, 2);
        FAIL("no error");
      } catch (const Error& e) {
        CHECK(e.code() == Code::weights);
      }
    }
    CHECK_THROWS_AS((void)quantised_weight(f, 4, 40, nullptr, nullptr, Place::host), Error);
  }
  CHECK_THROWS_AS((void)quantised_weight(WeightFormat::bf16, 4, 64, nullptr, nullptr, Place::host), Error);
}

TEST_CASE("linear with quantised weights: f64 of the values they stand for, rows independent, accumulation") {
  Random random(4);
  for (const WeightFormat f : kFormats) {
    for (const int threads : {1, 3}) {
      const auto ops = make_cpu_ops(threads);
      const TestWeight w(f, 21, 160, random);
      const int64_t rows = 7;
      Floats x = random.normals(rows * 160), y(at(rows * 21), NAN), alone(21, NAN);
      ops->linear({.x = tensor(x, {rows, 160}), .w = &w.w, .y = tensor(y, {rows, 21})});
      Doubles want = product(w, widen(x), rows);
      CHECK(relative_error(y, want) < 5e-6);
      ops->linear({.x = tensor(x, {rows, 160}).rows(5, 6), .w = &w.w, .y = tensor(alone, {1, 21})});
      CHECK(same_bits(alone, std::span(y).subspan(5 * 21, 21)));
      ops->linear({.x = tensor(x, {rows, 160}), .w = &w.w, .y = tensor(y, {rows, 21}), .beta = 0.5F});
      for (double& v : want) v *= 1.5;
      CHECK(relative_error(y, want) < 5e-6);
    }
    const auto ops = make_cpu_ops(1);
    TestWeight broken(f, 4, 64, random);
    broken.w.scales = {};
    Floats x(64), y(4);
    CHECK_THROWS_AS(ops->linear({.x = tensor(x, {1, 64}), .w = &broken.w, .y = tensor(y, {1, 4})}), Error);
  }
}

}  // namespace
}  // namespace glm53::test
