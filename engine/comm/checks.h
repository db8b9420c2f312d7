// Argument checks and row copies the communicators share.
#pragma once

#include <cstring>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/tensor.h"

namespace glm53 {

/// Rows and row bytes of a [rows][n] (or [n]) tensor whose rows are contiguous. Throws Error(internal) for anything
/// else.
struct RowShape {
  int64_t rows = 0;
  size_t bytes = 0;  ///< of one row
  size_t pitch = 0;  ///< bytes from one row to the next
};
inline RowShape row_shape(const Tensor& t, std::string_view what) {
  if (t.rank != 1 && t.rank != 2)
    throw Error(Code::internal, cat(what, ": rank ", int{t.rank}, ", expected [rows][n]"));
  const size_t element = size_of(t.dtype);
  if (t.rank == 1) return {1, static_cast<size_t>(t.shape[0]) * element, static_cast<size_t>(t.shape[0]) * element};
  if (t.shape[1] > 1 && t.stride[1] != 1) throw Error(Code::internal, cat(what, ": rows are not contiguous"));
  return {t.shape[0], static_cast<size_t>(t.shape[1]) * element, static_cast<size_t>(t.stride[0]) * element};
}

/// Writes `in` [rows][n] into columns [part·n, (part+1)·n) of `out` [rows][size·n].
inline void copy_rows(const Tensor& in, const Tensor& out, int part) {
  if (in.data == out.data && part == 0) return;
  const RowShape from = row_shape(in, "gather input"), to = row_shape(out, "gather output");
  const size_t offset = static_cast<size_t>(part) * from.bytes;
  if (from.rows != to.rows || offset + from.bytes > to.bytes || in.dtype != out.dtype)
    throw Error(Code::internal, cat("gather: output of ", to.rows, " rows of ", to.bytes, " bytes cannot hold part ",
                                    part, " of ", from.rows, " rows of ", from.bytes, " bytes"));
  const auto* source = static_cast<const std::byte*>(in.data);
  auto* target = static_cast<std::byte*>(out.data) + offset;
  for (int64_t r = 0; r < from.rows; ++r) {
    const auto row = static_cast<size_t>(r);
    std::memcpy(target + row * to.pitch, source + row * from.pitch, from.bytes);
  }
}

}  // namespace glm53
