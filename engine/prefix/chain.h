// The name of a prefix across processes (chain_hash.h makes them).
#pragma once

#include <array>
#include <cstdint>

namespace glm53::prefix {

/// 128 bits of SHA-256.
using ChainHash = std::array<uint8_t, 16>;

}  // namespace glm53::prefix
