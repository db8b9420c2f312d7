// Addresses inside the recurrent caches of one KDA layer.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/batch.h"

namespace glm53::cpu {

/// One layer's view of state, conv history and records, live and saved. Throws Error(internal) naming `op` when the
/// pools do not have the shapes that batch.h states.
class KdaCaches {
 public:
  KdaCaches(const Caches& caches, int layer, std::string_view op);

  float* state(int64_t slot, int64_t head) const;        ///< [dim][dim]
  float* saved_state(int64_t snap, int64_t head) const;  ///< throws for a bad id
  float* conv(int64_t slot) const;                       ///< [conv_columns][channels]
  float* saved_conv(int64_t snap) const;                 ///< [kernel-1][channels]; throws for a bad id
  float* record(int64_t slot, int64_t row) const;        ///< [record_width]
  /// Offset of a head's k in a record; v and gate follow, dim values each.
  int64_t record_head(int64_t head) const { return head * 3 * dim; }
  int64_t record_beta(int64_t head) const { return heads * 3 * dim + head; }

  int64_t heads, dim, channels, history, columns;

 private:
  void check_snap(const Tensor& pool, int64_t snap) const;

  const Caches& caches_;
  int64_t layer_;
  std::string_view op_;
};

/// Drops the first `count` columns after the history: the history becomes columns count … count + kernel − 2.
/// Channels [begin, end) of one slot.
void shift_history(const KdaCaches& caches, float* conv, int count, int64_t begin, int64_t end);

}  // namespace glm53::cpu
