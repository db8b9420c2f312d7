#include "kernels/exl3.h"

#include <array>
#include <cmath>
#include <string>

#include "common/error.h"
#include "kernels/half.h"

namespace glm53::exl3 {

namespace {

constexpr int64_t kTile = 16, kBlock = 128;

/// 3INST and MCG: two halves cut out of the product, added with one rounding. Both addends are fp16 normals, so the f32
/// sum is exact.
uint16_t folded(uint32_t product) {
  const uint32_t q = (product & 0x8fff8fffu) ^ 0x3b603b60u;
  return f32_to_f16(f16_to_f32(static_cast<uint16_t>(q)) + f16_to_f32(static_cast<uint16_t>(q >> 16)));
}

/// MUL1: byte sum, then an affine map with one rounding (the f64 product and sum are exact).
uint16_t byte_sum(uint32_t product) {
  const uint32_t sum = (product & 255u) + ((product >> 8) & 255u) + ((product >> 16) & 255u) + (product >> 24);
  const double exact =
      (1024.0 + sum) * static_cast<double>(f16_to_f32(0x1eee)) + static_cast<double>(f16_to_f32(0xc931));
  return f32_to_f16(static_cast<float>(exact));  // 22 significant bits at most: exact in f32 too
}

void check(const Weight& w) {
  const int64_t words = kTile * w.bits;
  if (w.format != WeightFormat::exl3 || w.bits < 1 || w.bits > 8 || w.in <= 0 || w.out <= 0 || w.in % kBlock != 0 ||
      w.out % kBlock != 0 || w.codes.elements() != w.in / kTile * (w.out / kTile) * words || w.suh.elements() != w.in ||
      w.svh.elements() != w.out) {
    throw Error(Code::internal,
                "not an EXL3 weight: " + std::to_string(w.out) + " x " + std::to_string(w.in) + ", " +
                    std::to_string(w.bits) + " bits",
                "sizes that are multiples of 128, bits 1 … 8, trellis [in/16, out/16, 16·bits], suh [in], svh [out]");
  }
}

template <Codebook C>
const std::array<float, 65536>& table() {
  static const auto values = [] {
    std::array<float, 65536> t{};
    for (uint32_t s = 0; s < t.size(); ++s) t[s] = f16_to_f32(code_bits(C, static_cast<uint16_t>(s)));
    return t;
  }();
  return values;
}

}  // namespace

uint16_t code_bits(Codebook codebook, uint16_t state) {
  const uint32_t s = state;
  switch (codebook) {
    case Codebook::three_inst:
      return folded(s * 89226354u + 64248484u);
    case Codebook::mcg:
      return folded(s * 0xcbac1fedu);
    case Codebook::mul1:
      return byte_sum(s * 0x83dcd12du);
  }
  throw Error(Code::internal, "EXL3 codebook " + std::to_string(static_cast<uint32_t>(codebook)), "0, 1 or 2");
}

std::span<const float> code_table(Codebook codebook) {
  switch (codebook) {
    case Codebook::three_inst:
      return table<Codebook::three_inst>();
    case Codebook::mcg:
      return table<Codebook::mcg>();
    case Codebook::mul1:
      return table<Codebook::mul1>();
  }
  throw Error(Code::internal, "EXL3 codebook " + std::to_string(static_cast<uint32_t>(codebook)), "0, 1 or 2");
}

uint16_t state_at(std::span<const uint16_t> tile, int bits, int i) {
  const unsigned words = 8u * static_cast<unsigned>(bits), total = 256u * static_cast<unsigned>(bits);
  const auto word = [&](unsigned w) { return tile[2 * w] | static_cast<uint64_t>(tile[2 * w + 1]) << 16; };
  const unsigned end = (static_cast<unsigned>(i) + 1) * static_cast<unsigned>(bits);
  const unsigned high = (end + total - 16) / 32 % words, low = (end - 1) / 32 % words;
  const unsigned shift = (32 - end % 32) % 32;
  return static_cast<uint16_t>((word(high) << 32 | word(low)) >> shift);
}

Position position_of(int i) {
  const int lane = i >> 3, j = i & 7;
  return {2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1), (lane >> 2) + 8 * (j >> 2)};
}

void hadamard128(float* v) {
  for (int half = 1; half < kBlock; half *= 2) {
    for (int base = 0; base < kBlock; base += 2 * half) {
      for (int i = base; i < base + half; ++i) {
        const float a = v[i], b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
    }
  }
  constexpr float kScale = 0.08838834764831845f;  // 1/√128
  for (int i = 0; i < kBlock; ++i) v[i] *= kScale;
}

std::vector<uint16_t> inner_matrix(const Weight& w) {
  check(w);
  const int64_t tiles = w.out / kTile, words = kTile * w.bits;
  const auto* codes = w.codes.as<uint16_t>();
  std::vector<uint16_t> inner(static_cast<size_t>(w.in * w.out));
  for (int64_t tk = 0; tk < w.in / kTile; ++tk) {
    for (int64_t tn = 0; tn < tiles; ++tn) {
      const std::span<const uint16_t> tile(codes + (tk * tiles + tn) * words, static_cast<size_t>(words));
      for (int i = 0; i < 256; ++i) {
        const auto [k, n] = position_of(i);
        inner[static_cast<size_t>((tk * kTile + k) * w.out + tn * kTile + n)] =
            code_bits(w.codebook, state_at(tile, w.bits, i));
      }
    }
  }
  return inner;
}

std::vector<float> dense_matrix(const Weight& w) {
  const std::vector<uint16_t> inner = inner_matrix(w);
  const auto* suh = w.suh.as<uint16_t>();
  const auto* svh = w.svh.as<uint16_t>();
  std::vector<float> dense(inner.size());
  for (int64_t n = 0; n < w.out; ++n) {
    float* row = dense.data() + n * w.in;
    for (int64_t k = 0; k < w.in; ++k) row[k] = f16_to_f32(inner[static_cast<size_t>(k * w.out + n)]);
    for (int64_t k = 0; k < w.in; k += kBlock) hadamard128(row + k);
    for (int64_t k = 0; k < w.in; ++k) row[k] *= f16_to_f32(suh[k]);
  }
  std::array<float, kBlock> column;
  for (int64_t k = 0; k < w.in; ++k) {
    for (int64_t n0 = 0; n0 < w.out; n0 += kBlock) {
      for (int64_t n = 0; n < kBlock; ++n)
        column[static_cast<size_t>(n)] = dense[static_cast<size_t>((n0 + n) * w.in + k)];
      hadamard128(column.data());
      for (int64_t n = 0; n < kBlock; ++n) {
        dense[static_cast<size_t>((n0 + n) * w.in + k)] = column[static_cast<size_t>(n)] * f16_to_f32(svh[n0 + n]);
      }
    }
  }
  return dense;
}

}  // namespace glm53::exl3
