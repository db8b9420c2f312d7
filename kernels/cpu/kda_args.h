// Checked arguments of kda_window and kda_chunk.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/cpu/batch_rows.h"
#include "kernels/cpu/kda_caches.h"
#include "kernels/cpu/kda_head.h"
#include "kernels/ops.h"

namespace glm53::cpu {

/// Throws Error(internal) when a shape does not fit the geometry.
class KdaCall {
 public:
  /// `dt_bias` is room for [heads·dim] values; the bias is widened into it.
  KdaCall(const KdaArgs& args, float* dt_bias, std::string_view op);

  /// Rows [begin, end) of one head, outputs included.
  HeadRows rows(int64_t head, int64_t begin, int64_t end) const;
  HeadGate gate(int64_t head) const;

  KdaCaches caches;
  BatchRows batch;

 private:
  const KdaArgs& args_;
  const float* dt_bias_;
};

/// Rows [0, count) of one head's records in a slot; no queries, no outputs.
HeadRows recorded_rows(const KdaCaches& caches, int64_t slot, int64_t head, int count, int record_width);

/// dt_bias [heads·dim] of a layer as f32; checks both weights.
void widen_gate(const Weight& a_log, const Weight& dt_bias, const KdaCaches& caches, std::string_view op, float* to);

}  // namespace glm53::cpu
