// Records of the paged cache: where a latent or a pooled key lies, and its code in each KvFormat (spec runtime
// §1.2–1.4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/batch.h"

namespace glm53::cpu {

/// One MLA layer's part of the block pool. Records are f32 outside; the format decides what is stored.
class LatentCache {
 public:
  /// `op` names the caller in errors. Throws Error(internal) when pools, layout and layer do not fit each other.
  LatentCache(const Caches& caches, int layer, std::string_view op);

  /// Latent of one token: [latent] values. 8-bit formats keep one fp32 scale per 128 values: amax / 448 (e4m3) or
  /// amax / 127 (int8), at least FLT_MIN. A NaN stays one: alone in e4m3, as a NaN scale of its 128 in int8.
  void write_latent(BlockId block, int token, const float* x) const;
  void read_latent(BlockId block, int token, float* y) const;
  /// The same without a copy where it is stored as it is: the record itself, or y filled from it.
  const float* latent_of(BlockId block, int token, float* y) const;

  /// Pooled indexer key: [index_dim] values. 8-bit formats store the key rotated by Hadamard-128 and rounded to bf16,
  /// with a power-of-two scale; reading gives the rotated key, so a query must be rotated too.
  void write_pool_key(BlockId block, int pool, const float* x) const;
  void read_pool_key(BlockId block, int pool, float* y) const;
  bool rotated() const { return size_of(layout_.element) == 1; }

  int latent() const { return latent_; }
  int index_dim() const { return index_dim_; }

 private:
  std::byte* part(BlockId block, size_t offset) const;

  BlockLayout layout_;
  KvFormat format_;
  int latent_, index_dim_;
  int64_t blocks_;
  std::byte* base_;
};

/// Block that holds `position` of sequence `seq`; BlockId::null means "nowhere": nothing is written there.
/// Throws Error(internal) when the table is too short or names a block outside the pool.
BlockId block_at(const Batch& batch, const Caches& caches, int64_t seq, int64_t position, std::string_view op);

/// In-place orthonormal Hadamard transform (natural order) of each 128 values; n is a multiple of 128. Its own inverse.
void hadamard128(float* x, int n);

}  // namespace glm53::cpu
