// Weights of every format for tests, with their values in f64.
#pragma once

#include <vector>

#include "kernels/exl3.h"
#include "kernels/half.h"
#include "kernels/quantise.h"
#include "tests/unit/kernels/cache_world.h"

namespace glm53::test {

/// Owns a random weight and knows its dense values.
struct TestWeight {
  Weight w;
  Floats f32;
  std::vector<uint16_t> words, suh, svh;
  std::vector<std::byte> codes, scales;
  Doubles dense;  ///< [out][in]

  TestWeight(WeightFormat format, int64_t out, int64_t in, Random& random, int bits = 4,
             Codebook codebook = Codebook::mcg) {
    w.format = format;
    w.out = out;
    w.in = in;
    if (format == WeightFormat::exl3) {
      fill_exl3(random, bits, codebook);
    } else if (is_quantised(format)) {
      fill_quantised(random);
    } else {
      f32 = random.normals(out * in, 1.0f / std::sqrt(static_cast<float>(std::max<int64_t>(in, 1))));
      words.resize(f32.size());
      for (size_t i = 0; i < f32.size(); ++i) {
        words[i] = f32_to_bf16(f32[i]);
        dense.push_back(static_cast<double>(format == WeightFormat::f32 ? f32[i] : bf16_to_f32(words[i])));
      }
      if (format == WeightFormat::f32) {
        w.codes = Tensor::of(f32.data(), Dtype::f32, {out, in});
      } else {
        w.codes = Tensor::of(words.data(), Dtype::bf16, {out, in});
      }
    }
  }
  TestWeight(const TestWeight&) = delete;
  TestWeight(TestWeight&&) = default;

 private:
  void fill_quantised(Random& random) {
    const Floats values = random.normals(w.out * w.in, 1.0f / std::sqrt(static_cast<float>(w.in)));
    codes.resize(at(code_bytes(w.format, w.out, w.in)));
    scales.resize(at(scale_bytes(w.format, w.out, w.in)));
    quantise_rows(w.format, values.data(), w.out, w.in, codes.data(), scales.data());
    w = quantised_weight(w.format, w.out, w.in, codes.data(), scales.data(), Place::host);
    f32.resize(values.size());
    for (int64_t o = 0; o < w.out; ++o) dequantise_row(w, o, f32.data() + o * w.in);
    dense.assign(f32.begin(), f32.end());
  }
  void fill_exl3(Random& random, int bits, Codebook codebook) {
    w.bits = bits;
    w.codebook = codebook;
    words.resize(at(w.in * w.out / 16 * bits));
    for (uint16_t& word : words) word = static_cast<uint16_t>(random.between(0, 65535));
    const float scale = 1.0f / std::sqrt(static_cast<float>(w.in));
    for (int64_t i = 0; i < w.in; ++i)
      suh.push_back(f32_to_f16(scale * (1.0f + 0.2f * random.normal()) * sign(random)));
    for (int64_t i = 0; i < w.out; ++i) svh.push_back(f32_to_f16((1.0f + 0.2f * random.normal()) * sign(random)));
    w.codes = Tensor::of(words.data(), Dtype::i16, {w.in / 16, w.out / 16, 16 * bits});
    w.suh = Tensor::of(suh.data(), Dtype::f16, {w.in});
    w.svh = Tensor::of(svh.data(), Dtype::f16, {w.out});
    for (const float v : exl3::dense_matrix(w)) dense.push_back(static_cast<double>(v));
  }
  static float sign(Random& random) { return random.between(0, 1) == 0 ? -1.0f : 1.0f; }
};

/// y[r] = W x[r] in f64; x is [rows][in].
inline Doubles product(const TestWeight& w, std::span<const double> x, int64_t rows) {
  Doubles y(at(rows * w.w.out));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < w.w.out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < w.w.in; ++i) sum += w.dense[at(o * w.w.in + i)] * x[at(r * w.w.in + i)];
      y[at(r * w.w.out + o)] = sum;
    }
  }
  return y;
}

inline Doubles widen(std::span<const float> v) {
  return {v.begin(), v.end()};
}

}  // namespace glm53::test
