// What the kernels of index_select share.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/latent.cuh"

namespace glm53::cuda {

struct Select {
  Matrix query, head_weight;
  int64_t heads, top, most;
  float* scores;  ///< [rows of the tile][most]
  int* choices;   ///< [rows of the tile][choice_words], where several blocks share the choice of a row; else null
  Matrix shown;   ///< what a caller asked to see; data null otherwise
  int32_t *selected, *count;
  int64_t selected_stride, first_row;
};

__device__ inline int64_t candidates(const Rows& b, const LatentView& c, const Select& a, int64_t row) {
  if (padding_row(b, row)) return 0;
  return min((int64_t{b.position[row]} + 1) / c.kpool, a.most);
}

/// A score as an integer of the same order, −0 equal to +0.
__device__ inline uint32_t ordered(float score) {
  const uint32_t bits = __float_as_uint(score == 0.0F ? 0.0F : score);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;

/// What the blocks that share a row tell one another, as words: how often each first digit of a score occurs, the same
/// for second digits under the first digit that decides, three counts, and two lists of pools.
constexpr int kFirstDigits = 0, kSecondDigits = kBins, kCounts = 2 * kBins, kLists = kCounts + 8;
enum : int { kSure, kMaybe, kDone };  // counts: pools surely chosen, pools that share the deciding digit, blocks
constexpr int64_t kSharedRows = 32, kSharedPools = 8192, kMaxSharedTop = 1024;

inline __host__ __device__ int64_t choice_words(const Select& a) {
  return kLists + (a.top + a.most + 3) / 4 * 4;
}
/// Zeroes the counts of `rows` rows and returns where choices lie, behind the scores of a tile.
int* clear_choices(const Select& a, unsigned rows, int64_t tile, cudaStream_t on);
/// The `top` best pools of each row, ties to the lower pool, ascending. `shared`: several blocks a row; the scoring has
/// counted first digits.
void choose_pools(const Rows& b, const LatentView& c, const Select& a, unsigned rows, bool shared, cudaStream_t on);

}  // namespace glm53::cuda
