// bf16, fp16 and e4m3 conversions for hosts; round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace glm53 {

inline float bf16_to_f32(uint16_t v) {
  return std::bit_cast<float>(static_cast<uint32_t>(v) << 16);
}
inline uint16_t f32_to_bf16(float f) {
  const auto u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);  // keep NaN a NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float f16_to_f32(uint16_t v);
uint16_t f32_to_f16(float f);
/// e4m3fn: saturates at ±448, NaN stays NaN (spec runtime §1.2).
uint8_t f32_to_e4m3(float f);
float e4m3_to_f32(uint8_t v);

}  // namespace glm53
