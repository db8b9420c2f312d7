// Philox4x32-10: a counter-based random generator. The draw of a position depends on nothing but key and counter.
#pragma once

#include <array>
#include <cstdint>

namespace glm53 {

/// Ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMul0 * counter[0], p1 = kMul1 * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

/// What a draw is for (spec speculative §3.4).
enum class DrawStream : uint32_t { target = 0, acceptance = 1, draft = 2 };

/// Uniform in [0, 1) with 53 bits, of output position `position` under `seed`.
constexpr double uniform_draw(uint64_t seed, uint32_t position, DrawStream stream) {
  const auto x = philox4x32({position, static_cast<uint32_t>(stream), 0, 0},
                            {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<double>(((static_cast<uint64_t>(x[0]) << 32) | x[1]) >> 11) * 0x1p-53;
}

}  // namespace glm53
