// Names of prefixes that hold across processes: file names of spilled blocks, logs. The index itself compares tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/prefix/chain.h"
#include "engine/prefix/prefix_tree.h"

namespace glm53::prefix {

/// Everything besides tokens that decides the bytes of a cached block.
struct CacheIdentity {
  std::string model_revision;
  std::string weights_digest;  ///< of the weights as loaded: edits and formats included
  std::string kv_format;
  int32_t kpool = 0, topk = 0;
};

/// H_0 of a root.
ChainHash chain_root(const CacheIdentity& identity, std::string_view salt);
/// H_i = SHA-256(H_{i-1} ‖ token ids as u32, little-endian ‖ media), cut to 128 bits. For fewer than 64 tokens their
/// number follows as one byte, so that no partial block has the bytes of a full one. Throws Error(internal) for an
/// empty slice or one of more than 64 tokens. The slice's origin is not part of the name.
ChainHash chain_next(const ChainHash& before, const Slice& slice);
/// Of every block of a sequence; the last may be partial.
std::vector<ChainHash> chain_of(const ChainHash& root, const Prefix& prefix);
/// Lower-case hex.
std::string to_text(const ChainHash& hash);

}  // namespace glm53::prefix
