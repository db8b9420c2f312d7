// A Batch as the CPU operators read it: checked once, then plain numbers.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/batch.h"

namespace glm53::cpu {

/// One sequence of a step.
struct SeqRows {
  int64_t seq = 0;
  int32_t slot = -1;           ///< −1: padding, touches no cache
  int64_t begin = 0, end = 0;  ///< rows
  int32_t position = 0;        ///< of row `begin`
  int32_t replay = 0;
  bool window = false;
  std::array<int32_t, 2> export_pos{-1, -1}, export_snap{-1, -1};  ///< −1 = none; only in the chunk regime

  int rows() const { return static_cast<int>(end - begin); }
};

/// Throws Error(internal) naming `op` when the batch contradicts itself: shapes, row ranges, positions of a sequence
/// that are not consecutive, windows longer than max_window, replay in the chunk regime, exports outside their piece.
class BatchRows {
 public:
  /// `capacity` is the number of rows of the operator's tensors.
  BatchRows(const Batch& batch, const Caches& caches, int64_t capacity, std::string_view op);

  int64_t rows() const { return batch_.rows; }
  int64_t seqs() const { return batch_.seqs; }
  int64_t window_seqs() const { return batch_.window_seqs; }
  int64_t window_rows() const { return batch_.window_rows; }
  int32_t position(int64_t row) const { return batch_.position.as<const int32_t>()[row]; }
  int64_t seq_of(int64_t row) const { return batch_.row_seq.as<const int32_t>()[row]; }
  bool padding(int64_t row) const { return row >= batch_.rows || slot(seq_of(row)) < 0; }
  int32_t slot(int64_t seq) const { return batch_.slot.as<const int32_t>()[seq]; }
  SeqRows at(int64_t seq) const;

 private:
  void check(const Caches& caches, int64_t capacity, std::string_view op) const;

  const Batch& batch_;
};

/// Zeroes rows [begin, end) of a f32 tensor of rank 2.
void zero_rows(const Tensor& t, int64_t begin, int64_t end);

}  // namespace glm53::cpu
