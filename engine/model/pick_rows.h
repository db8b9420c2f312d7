// Some rows of an activation, brought together.
#pragma once

#include "kernels/ops.h"

namespace glm53 {

/// out[i] = from[row[i]]. from act [R][H], row i32 [L], out act [L][H]. An embedding whose table is an activation and
/// whose tokens are row numbers.
inline void pick_rows(Ops& ops, const Tensor& from, const Tensor& row, const Tensor& out) {
  Weight table;
  table.format = from.dtype == Dtype::f32 ? WeightFormat::f32 : WeightFormat::bf16;
  table.out = from.dim(0);
  table.in = from.dim(1);
  table.codes = from;
  Batch pick;
  pick.rows = static_cast<int>(row.dim(0));
  pick.token = row;
  ops.embed({&pick, &table, out});
}

}  // namespace glm53
