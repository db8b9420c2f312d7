// Digests of bytes: SHA-256 for identity, XXH3 for speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace glm53 {

/// Lower-case hex.
std::string sha256_hex(std::string_view data);
/// Incremental SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void update(std::string_view data);
  std::string hex();  ///< finishes

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
uint64_t xxh64(std::span<const std::byte> data);
/// `bytes` random bytes as hex, from the system.
std::string random_hex(size_t bytes);

}  // namespace glm53
