#include "kernels/cpu/trellis.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/check.h"
#include "kernels/cpu/hot.h"
#include "kernels/half.h"

namespace glm53::cpu {

namespace {

constexpr int64_t kBlock = 128;
/// Rows for which a tile is decoded once: their accumulators (512 bytes a row) stay in the second-level cache.
constexpr int64_t kRows = 240;

}  // namespace

void expect_trellis(std::string_view op, const Weight& w) {
  expect_that(w.format == WeightFormat::exl3, op, "weight is not EXL3");
  expect_that(w.bits >= 1 && w.bits <= 8, op, "EXL3 weight needs 1 … 8 bits");
  expect_that(static_cast<uint32_t>(w.codebook) <= 2, op, "EXL3 codebook must be 0, 1 or 2");
  expect_that(w.in > 0 && w.out > 0 && w.in % kBlock == 0 && w.out % kBlock == 0, op,
              "EXL3 sizes must be multiples of 128");
  expect(op, "trellis", w.codes, Dtype::i16, {w.in / 16, w.out / 16, 16 * w.bits});
  expect(op, "suh", w.suh, Dtype::f16, {w.in});
  expect(op, "svh", w.svh, Dtype::f16, {w.out});
  expect_that(w.codes.contiguous() && w.suh.contiguous() && w.svh.contiguous(), op, "EXL3 weight must be contiguous");
}

void widen_scales(const Tensor& half, float* out) {
  const auto* from = half.as<const uint16_t>();
  const int64_t n = half.elements();
  for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(from[i]);
}

void rotate_input(const float* x, const float* suh, int64_t in, float* xh) {
  for (int64_t i = 0; i < in; ++i) xh[i] = x[i] * suh[i];
  hot_kernels().hadamard(xh, in);
}

size_t trellis_block_scratch(int64_t rows) {
  return kTrellisScratch + static_cast<size_t>(std::min(rows, kRows) * kBlock);
}

void trellis_block(const Weight& w, int64_t block, std::span<const float* const> rows, float* scratch,
                   FunctionRef<void(int64_t row, const float* y)> sink) {
  const HotKernels& hot = hot_kernels();
  std::array<float, kBlock> svh;
  widen_scales(w.svh.columns(block * kBlock, (block + 1) * kBlock), svh.data());
  float* t = scratch + kTrellisScratch;
  const auto count = static_cast<int64_t>(rows.size());
  for (int64_t begin = 0; begin < count; begin += kRows) {
    const int64_t n = std::min(kRows, count - begin);
    hot.trellis({.codes = w.codes.as<const uint16_t>(),
                 .bits = w.bits,
                 .codebook = static_cast<uint32_t>(w.codebook),
                 .in = w.in,
                 .out = w.out,
                 .block = block,
                 .x = rows.data() + begin,
                 .rows = n,
                 .t = t,
                 .scratch = scratch});
    hot.hadamard(t, n * kBlock);
    for (int64_t r = 0; r < n; ++r) {
      float* y = t + r * kBlock;
      for (int64_t i = 0; i < kBlock; ++i) y[i] *= svh[static_cast<size_t>(i)];
      sink(begin + r, y);
    }
  }
}

}  // namespace glm53::cpu
