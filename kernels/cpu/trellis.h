// EXL3 linears in their inference form (spec exl3 §3.2): y = (H · (H(x ⊙ suh) · Ŵ)) ⊙ svh, everything between in f32.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/cpu/thread_pool.h"
#include "kernels/weight.h"

namespace glm53::cpu {

/// Throws Error(internal) unless w is a well-formed EXL3 weight in host memory.
void expect_trellis(std::string_view op, const Weight& w);

/// fp16 scales as f32.
void widen_scales(const Tensor& half, float* out);

/// xh = H(x ⊙ suh); suh already widened. xh may be x.
void rotate_input(const float* x, const float* suh, int64_t in, float* xh);

/// Values of scratch that trellis_block needs for `rows` rows.
size_t trellis_block_scratch(int64_t rows);

/// One block of 128 outputs for some rows of rotated inputs; hands each row's 128 finished outputs to `sink`, rows in
/// order.
void trellis_block(const Weight& w, int64_t block, std::span<const float* const> rows, float* scratch,
                   FunctionRef<void(int64_t row, const float* y)> sink);

}  // namespace glm53::cpu
