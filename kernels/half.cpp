#include "kernels/half.h"

namespace glm53 {

namespace {

/// |f| rounded to nearest even as a small float with `mantissa` bits and exponent bias `bias`; the result may exceed
/// the format's range.
uint32_t round_magnitude(uint32_t u, int mantissa, int bias) {
  const int drop = 23 - mantissa;
  const int exponent = static_cast<int>(u >> 23) - 127 + bias;
  if (exponent > 0) {
    const uint32_t rebased = u - (static_cast<uint32_t>(127 - bias) << 23);
    return (rebased + ((1u << (drop - 1)) - 1) + ((rebased >> drop) & 1u)) >> drop;
  }
  // Subnormal in the target: the implicit one becomes explicit and moves right.
  const int shift = drop + 1 - exponent;
  if (shift > 25) return 0;
  const uint32_t m = (u & 0x7fffffu) | (u >> 23 == 0 ? 0u : 0x800000u);
  const uint32_t half = 1u << (shift - 1);
  return (m + half - 1 + ((m >> shift) & 1u)) >> shift;
}

}  // namespace

float f16_to_f32(uint16_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16;
  const uint32_t exponent = (v >> 10) & 31u, mantissa = v & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

uint16_t f32_to_f16(float f) {
  const auto bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (bits >> 16) & 0x8000u, u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and more
  return static_cast<uint16_t>(sign | round_magnitude(u, 10, 15));     // a carry into 31 is infinity, as it should be
}

uint8_t f32_to_e4m3(float f) {
  const auto bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (bits >> 24) & 0x80u, u = bits & 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (u >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and more saturate
  const uint32_t code = round_magnitude(u, 3, 7);
  return static_cast<uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

float e4m3_to_f32(uint8_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24;
  const uint32_t exponent = (v >> 3) & 15u, mantissa = v & 7u;
  if ((v & 0x7fu) == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

}  // namespace glm53
