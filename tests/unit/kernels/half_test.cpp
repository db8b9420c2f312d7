// Small floats against a search for the nearest value.
#include "kernels/half.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace glm53 {
namespace {

/// Value of a small float from its definition, finite codes only.
double value_of(uint32_t code, int mantissa_bits, int bias) {
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(code >> mantissa_bits);
  if (exponent == 0) return std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
  return std::ldexp(1.0 + std::ldexp(static_cast<double>(mantissa), -mantissa_bits), exponent - bias);
}

/// Code of the nearest of the first `codes` values, ties to the even code.
uint32_t nearest(double x, uint32_t codes, int mantissa_bits, int bias) {
  uint32_t low = 0, high = codes - 1;
  while (high - low > 1) {
    const uint32_t mid = (low + high) / 2;
    (value_of(mid, mantissa_bits, bias) <= x ? low : high) = mid;
  }
  const double below = x - value_of(low, mantissa_bits, bias), above = value_of(high, mantissa_bits, bias) - x;
  if (below == above) return low % 2 == 0 ? low : high;
  return below < above ? low : high;
}

/// Random magnitudes over the format's range, exact ties and their neighbours.
std::vector<float> probes(int mantissa_bits, int bias, uint32_t codes) {
  std::mt19937 random(7);
  std::vector<float> xs = {0.0f, 1e-45f, 1e-38f};
  for (int i = 0; i < 20000; ++i) {
    const auto code = static_cast<uint32_t>(random() % (codes - 1));
    const double a = value_of(code, mantissa_bits, bias), b = value_of(code + 1, mantissa_bits, bias);
    const auto middle = static_cast<float>((a + b) / 2);
    xs.push_back(middle);
    xs.push_back(std::nextafter(middle, 0.0f));
    xs.push_back(std::nextafter(middle, INFINITY));
    xs.push_back(static_cast<float>(a + (b - a) * static_cast<double>(random() % 1000) / 1000.0));
  }
  return xs;
}

TEST_CASE("f16: every code, and rounding to nearest even") {
  int wrong = 0;
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    wrong += static_cast<double>(f16_to_f32(static_cast<uint16_t>(code))) != value_of(code, 10, 15);
    wrong += static_cast<double>(f16_to_f32(static_cast<uint16_t>(code | 0x8000))) != -value_of(code, 10, 15);
    wrong += f32_to_f16(f16_to_f32(static_cast<uint16_t>(code | 0x8000))) != (code | 0x8000);
  }
  for (const float x : probes(10, 15, 0x7c00)) {
    const uint32_t want = nearest(static_cast<double>(x), 0x7c00, 10, 15);
    wrong += f32_to_f16(x) != want;
    wrong += f32_to_f16(-x) != (want | 0x8000);
  }
  CHECK(wrong == 0);
  CHECK(f32_to_f16(65504.0f) == 0x7bff);
  CHECK(f32_to_f16(65519.9f) == 0x7bff);
  CHECK(f32_to_f16(65520.0f) == 0x7c00);
  CHECK(f32_to_f16(1e30f) == 0x7c00);
  CHECK(f32_to_f16(-INFINITY) == 0xfc00);
  CHECK(std::isnan(f16_to_f32(f32_to_f16(NAN))));
  CHECK(std::isinf(f16_to_f32(0x7c00)));
  CHECK(std::signbit(f16_to_f32(0x8000)));
}

TEST_CASE("e4m3: every code, rounding, saturation") {
  int wrong = 0;
  for (uint32_t code = 0; code < 0x7f; ++code) {
    wrong += static_cast<double>(e4m3_to_f32(static_cast<uint8_t>(code))) != value_of(code, 3, 7);
    wrong += static_cast<double>(e4m3_to_f32(static_cast<uint8_t>(code | 0x80))) != -value_of(code, 3, 7);
    wrong += f32_to_e4m3(e4m3_to_f32(static_cast<uint8_t>(code | 0x80))) != (code | 0x80);
  }
  for (const float x : probes(3, 7, 0x7f)) {
    const uint32_t want = nearest(static_cast<double>(x), 0x7f, 3, 7);
    wrong += f32_to_e4m3(x) != want;
    wrong += f32_to_e4m3(-x) != (want | 0x80);
  }
  CHECK(wrong == 0);
  CHECK(e4m3_to_f32(0x7e) == 448.0f);
  CHECK(f32_to_e4m3(463.9f) == 0x7e);
  CHECK(f32_to_e4m3(1e30f) == 0x7e);
  CHECK(f32_to_e4m3(-INFINITY) == 0xfe);
  CHECK(std::isnan(e4m3_to_f32(f32_to_e4m3(NAN))));
}

TEST_CASE("bf16 rounds to nearest even and keeps NaN") {
  int wrong = 0;
  for (const float x : probes(7, 127, 0x7f80)) {
    wrong += f32_to_bf16(x) != nearest(static_cast<double>(x), 0x7f80, 7, 127);
  }
  CHECK(wrong == 0);
  CHECK(bf16_to_f32(0x3f80) == 1.0f);
  CHECK(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
  CHECK(f32_to_bf16(INFINITY) == 0x7f80);
  CHECK(f32_to_bf16(std::numeric_limits<float>::max()) == 0x7f80);
}

}  // namespace
}  // namespace glm53
