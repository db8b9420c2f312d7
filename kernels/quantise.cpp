#include "kernels/quantise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "common/error.h"
#include "kernels/half.h"

namespace glm53 {
namespace {

constexpr float kLargest = 0x1p+120F;  // beyond, products with the codes could leave what bf16 holds
constexpr int kLeastExponent = -100;   // of a scale; smaller weights become zeros

void check_format(WeightFormat f, int64_t in) {
  if (!is_quantised(f)) throw Error(Code::unavailable, "quantise: the format is not quantised", "fp8_row or int4_g32");
  if (in % kQuantGroup != 0) {
    throw Error(Code::unavailable, "quantise: a row has " + std::to_string(in) + " inputs", "a multiple of 32");
  }
}

float largest_of(const float* v, int64_t n, int64_t row) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::fabs(v[i]);
    if (!(size <= kLargest)) {
      throw Error(
          Code::weights,
          "quantise: value " + std::to_string(i) + " of row " + std::to_string(row) + " is " + std::to_string(v[i]),
          "a finite number below 2^120");
    }
    largest = std::max(largest, size);
  }
  return largest;
}

float fp8_scale(float largest) {
  if (largest == 0) return 1;
  int exponent = 0;
  const float fraction = std::frexp(largest, &exponent);  // largest = fraction · 2^exponent, fraction in [0.5, 1)
  // 448 = 0.875 · 2^9
  return std::ldexp(1.0F, std::max(kLeastExponent, exponent - (fraction <= 0.875F ? 9 : 8)));
}

void fp8_row(const float* v, int64_t in, float scale, uint8_t* codes) {
  const float inverse = 1.0F / scale;  // exact, a power of two
  for (int64_t i = 0; i < in; ++i) codes[code_place(WeightFormat::fp8_row, i)] = f32_to_e4m3(v[i] * inverse);
}

/// Round to nearest even for |x| < 2^22, in a form that compilers turn into vectors.
float nearest(float x) {
  constexpr float kShift = 12582912.0F;
  return x + kShift - kShift;
}

float squared_error(const float* v, float scale) {
  const float inverse = 1.0F / scale;
  std::array<float, 8> sum{};
  for (size_t i = 0; i < static_cast<size_t>(kQuantGroup); i += sum.size()) {
    for (size_t lane = 0; lane < sum.size(); ++lane) {
      const float code = std::min(7.0F, std::max(-8.0F, nearest(v[i + lane] * inverse)));
      const float error = v[i + lane] - code * scale;
      sum[lane] += error * error;
    }
  }
  float total = 0;
  for (const float s : sum) total += s;
  return total;
}

/// The scale of a group: five significant bits, whichever sign.
float int4_scale(const float* v, float largest) {
  if (largest == 0) return 1;
  int exponent = 0;
  // The least scale of five bits with which the extreme is at most eight of them.
  const int units = static_cast<int>(std::ceil(std::ldexp(std::frexp(largest / 8, &exponent), 5)));
  if (exponent - 5 < kLeastExponent) return std::ldexp(1.0F, kLeastExponent);
  // Squares must neither vanish nor overflow: compare in units of the scale.
  std::array<float, kQuantGroup> scaled{};
  for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = std::ldexp(v[i], 5 - exponent);
  float best = 0, least = std::numeric_limits<float>::infinity();
  constexpr int kBelow = 5, kAbove = 3;  // of 16 to 32 units: from about 0.75 to 1.15 times
  for (int n = units - kBelow; n <= units + kAbove; ++n) {
    const int rounded = n > 32 ? (n + 1) / 2 * 2 : n;  // above 32 units only even ones have five bits
    for (const float sign : {-1.0F, 1.0F}) {
      const float scale = sign * static_cast<float>(rounded);
      const float error = squared_error(scaled.data(), scale);
      if (error < least) {
        least = error;
        best = scale;
      }
    }
  }
  return std::ldexp(best, exponent - 5);
}

void int4_group(const float* v, float scale, uint8_t* codes) {
  std::array<uint8_t, kQuantGroup> nibbles{};
  for (int64_t i = 0; i < kQuantGroup; ++i) {
    const float code = std::min(7.0F, std::max(-8.0F, nearest(v[i] / scale)));
    nibbles[static_cast<size_t>(code_place(WeightFormat::int4_g32, i))] =
        static_cast<uint8_t>(static_cast<int>(code) + 8);
  }
  for (size_t b = 0; b < nibbles.size() / 2; ++b) {
    codes[b] = static_cast<uint8_t>(nibbles[2 * b] | static_cast<unsigned>(nibbles[2 * b + 1]) << 4);
  }
}

}  // namespace

Weight quantised_weight(WeightFormat f, int64_t out, int64_t in, void* codes, void* scales, Place place) {
  check_format(f, in);
  Weight w;
  w.format = f;
  w.out = out;
  w.in = in;
  if (f == WeightFormat::fp8_row) {
    w.codes = Tensor::of(codes, Dtype::e4m3, {out, in}, place);
    w.scales = Tensor::of(scales, Dtype::f32, {out}, place);
  } else {
    w.codes = Tensor::of(codes, Dtype::u8, {out, in / 2}, place);
    w.scales = Tensor::of(scales, Dtype::bf16, {out, in / kQuantGroup}, place);
  }
  return w;
}

void quantise_rows(WeightFormat f, const float* values, int64_t rows, int64_t in, void* codes, void* scales) {
  check_format(f, in);
  auto* code = static_cast<uint8_t*>(codes);
  for (int64_t r = 0; r < rows; ++r, values += in, code += code_bytes(f, 1, in)) {
    const float largest = largest_of(values, in, r);
    if (f == WeightFormat::fp8_row) {
      const float scale = fp8_scale(largest);
      static_cast<float*>(scales)[r] = scale;
      fp8_row(values, in, scale, code);
      continue;
    }
    for (int64_t g = 0; g < in / kQuantGroup; ++g) {
      const float* v = values + g * kQuantGroup;
      const float scale = int4_scale(v, largest_of(v, kQuantGroup, r));
      static_cast<uint16_t*>(scales)[r * (in / kQuantGroup) + g] = f32_to_bf16(scale);
      int4_group(v, scale, code + g * kQuantGroup / 2);
    }
  }
}

void dequantise_row(const Weight& w, int64_t row, float* values) {
  const auto* codes = static_cast<const uint8_t*>(w.codes.data) + row * code_bytes(w.format, 1, w.in);
  if (w.format == WeightFormat::fp8_row) {
    const float scale = w.scales.as<const float>()[row];
    for (int64_t i = 0; i < w.in; ++i) values[i] = e4m3_to_f32(codes[code_place(w.format, i)]) * scale;
    return;
  }
  const uint16_t* scales = w.scales.as<const uint16_t>() + row * (w.in / kQuantGroup);
  for (int64_t i = 0; i < w.in; ++i) {
    const int64_t place = code_place(w.format, i);
    const int code = (codes[place / 2] >> (place % 2 * 4) & 15) - 8;
    values[i] = static_cast<float>(code) * bf16_to_f32(scales[i / kQuantGroup]);
  }
}

}  // namespace glm53
