// What the kernels of index_select share.
#pragma once

#include "kernels/cuda/latent.cuh"

namespace glm53::cuda {

struct Select {
  Matrix query, head_weight;
  int64_t heads, top, most;
  float* scores;  ///< [rows of the tile][most]
  Matrix shown;   ///< what a caller asked to see; data null otherwise
  int32_t *selected, *count;
  int64_t selected_stride, first_row;
};

__device__ inline int64_t candidates(const Rows& b, const LatentView& c, const Select& a, int64_t row) {
  if (padding_row(b, row)) return 0;
  return min((int64_t{b.position[row]} + 1) / c.kpool, a.most);
}

}  // namespace glm53::cuda
