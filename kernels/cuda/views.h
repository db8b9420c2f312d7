// What kernels receive: plain views, made from checked tensors. Kernels take f32 and bf16 alike and compute in f32.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "kernels/batch.h"
#include "kernels/tensor.h"
#include "kernels/weight.h"

namespace glm53::cuda {

/// Rows of f32 or bf16 values; `stride` counts values between rows.
struct Matrix {
  void* data;
  int64_t stride, rows, columns;
  bool bf16;
};

/// A plain weight, row-major.
struct Plain {
  const void* data;
  bool bf16;
};

/// One expert or linear in the format it has.
struct Linear {
  const void *codes, *suh, *svh;
  int32_t bits, codebook;  ///< bits 0: plain
  int32_t bf16;
  bool operator==(const Linear&) const = default;
};

/// A Batch as kernels read it. Its arrays are pinned or device memory.
struct Rows {
  const int32_t *position, *row_seq, *row_begin, *slot, *replay, *table, *export_pos, *export_snap;
  int64_t table_stride;
  int32_t rows, seqs, window_rows, window_seqs, capacity, max_blocks;
};

/// The blocks of one MLA layer.
struct LatentView {
  uint8_t* base;
  int64_t block_bytes, codes, scales, pool_keys, pool_scales, blocks;
  int32_t latent, index_dim, kpool, format;
};

/// Throws Error(internal) naming operator, argument, found and expected unless t has this shape (−1 = any), is f32 or
/// bf16, and lives where the device can read it.
Matrix matrix(std::string_view op, std::string_view argument, const Tensor& t, std::initializer_list<int64_t> shape);
/// The same for one given dtype.
void expect(std::string_view op, std::string_view argument, const Tensor& t, Dtype dtype,
            std::initializer_list<int64_t> shape);
void expect_that(bool ok, std::string_view op, std::string_view text);
/// A weight of plain values; throws Error(unavailable) for other formats.
Plain plain(std::string_view op, std::string_view argument, const Weight& w, int64_t out, int64_t in);
/// A plain or EXL3 weight of this size.
Linear linear_view(std::string_view op, std::string_view argument, const Weight& w, int64_t out, int64_t in);
Rows rows_of(std::string_view op, const Batch& batch, int64_t capacity);
LatentView latent_view(std::string_view op, const Caches& caches, int layer);

}  // namespace glm53::cuda
