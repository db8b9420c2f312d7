// Operators that only drafters need (spec speculative §1). The rules of kernels/ops.h hold for them too. A backend
// without them throws Error(unavailable) naming the operator.
#pragma once

#include "kernels/ops.h"

namespace glm53 {

/// Rotary embedding by half-split (§1.5), in place: for every head of `dim` values and j < dim/2, with φ = position ·
/// theta^(−2j/dim): x'[j] = x[j] cos φ − x[j + dim/2] sin φ, x'[j + dim/2] = x[j + dim/2] cos φ + x[j] sin φ. x act
/// [R][heads·dim], may be a column view; position i32 [R] ≥ 0. Angles in double precision.
struct RopeArgs {
  Tensor x, position;
  int dim = 0;
  double theta = 0;
};

/// Grouped dynamic causal convolution over the rows of each block (§1.7). Rows come in blocks of `block`; row t of a
/// block sees itself and rows t−1 … t−kernel+1 of its own block:
///   out[t][c] = Σ_j (base[side][j][c] + delta[t][(side·kernel + j)·G + c/group]) · x[t−j][c],  G = H / group
/// x, out act [B·block][H] (no alias); delta act [B·block][2·kernel·G]; base plain, 2·kernel·H values as
/// [side][tap][H].
struct BlockConvArgs {
  Tensor x, delta;
  const Weight* base = nullptr;
  int side = 0, block = 0, kernel = 0, group = 0;
  Tensor out;
};

/// Keys and values of a drafter's context, act [slots][layers][ring][kv heads · dim]; position p lives at p % ring.
struct DraftCache {
  Tensor keys, values;
};

/// Stores keys (turned and normed) and values of rows: k, v act [R][kv heads · dim], slot and position i32 [R]; rows of
/// slot −1 touch nothing. No two rows may meet in one place.
struct DraftWriteArgs {
  const DraftCache* cache = nullptr;
  int layer = 0;
  Tensor slot, position, k, v;
};

/// Attention of draft blocks (§1.8). Row i of block b has position P = position[b] + i and sees all rows of its block,
/// in both directions, and the context positions t with begin[b] ≤ t < end[b] and P − t < window; nothing else is read.
/// Softmax over both together in fp32. q, out act [B·block][heads·dim]; k, v act [B·block][kv heads · dim], where query
/// head h reads kv head h / (heads / kv heads); slot, position, begin, end i32 [B], position ≥ end ≥ begin ≥ 0 and
/// end − begin ≤ ring. A block of slot −1 is padding.
struct DraftAttentionArgs {
  const DraftCache* cache = nullptr;
  int layer = 0;
  Tensor q, k, v;
  Tensor slot, position, begin, end;
  int block = 0, heads = 0, dim = 0, window = 0;
  float scale = 0;
  Tensor out;
};

/// The k best of each row, descending, ties to the lower id: logits f32 [L][V], the id of column j is id[l][j] (i32
/// [L][V]) or, without, first + j. value f32 [L][k], index i32 [L][k]; −inf and −1 where a row has fewer that are more
/// than −inf. NaN is never chosen.
struct TopLogitsArgs {
  Tensor logits, id;
  int32_t first = 0;
  Tensor value, index;
};

/// Walk through the candidates of B sequences of m positions (§1.10), greedy:
///   score[b][i][c] = unary[b][i][c] + Σ_r predecessor[prev][r] · hidden[b][i][r] · successor[candidate[b][i][c]][r]
/// with prev the token chosen at i−1, anchor[b] at first; token[b][i] = the candidate of the best score, ties to the
/// earlier one. unary f32, candidate i32, score f32 [B·m][k]; hidden f32 [B·m][rank]; predecessor, successor plain
/// [V][rank]; anchor i32 [B]; token i32 [B·m]. Candidate −1 scores −inf; a row without candidates ends its walk: −1
/// from there on.
struct SelectorWalkArgs {
  Tensor unary, candidate, hidden;
  const Weight *predecessor = nullptr, *successor = nullptr;
  Tensor anchor, token, score;
};

}  // namespace glm53
