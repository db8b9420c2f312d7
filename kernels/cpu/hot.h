// The inner loops worth an instruction set: compiled once for the baseline and once for AVX2 with FMA, chosen when the
// program starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace glm53::cpu {

/// y[r][o] = Σ_i W[o][i]·x[r][i] + beta·y[r][o] for outputs [out_begin, out_end) and all rows. Each output is one sum
/// of eight lanes over i and their fixed tree: no bit depends on rows, on the cut of outputs, or on how rows are tiled.
struct DenseJob {
  const void* w;  ///< f32 or bf16 [out][in]
  bool bf16;
  int64_t in, out_begin, out_end;
  const float* x;
  int64_t x_stride, rows;
  float* y;
  int64_t y_stride;
  float beta;      ///< 0: y is not read
  float* scratch;  ///< dense_scratch(rows) values
};
inline constexpr int64_t kPanelOuts = 8, kPanelDepth = 512, kDenseRows = 240;
constexpr size_t dense_scratch(int64_t rows) {
  return static_cast<size_t>(kPanelOuts * kPanelDepth + (rows < kDenseRows ? rows : kDenseRows) * kPanelOuts * 8);
}

/// t[r][n] = Σ_k x[r][k]·Ŵ[k][n] for one block of 128 outputs of an EXL3 weight; k in ascending order, one multiply-add
/// each.
struct TrellisJob {
  const uint16_t* codes;  ///< [in/16][out/16][16·bits]
  int bits;
  uint32_t codebook;
  int64_t in, out, block;  ///< outputs [128·block, 128·block + 128)
  const float* const* x;   ///< a pointer for each row: rotated inputs [in]
  int64_t rows;
  float* t;        ///< [rows][128]
  float* scratch;  ///< kTrellisScratch values
};
inline constexpr int64_t kTrellisDepth = 32;
inline constexpr size_t kTrellisScratch = kTrellisDepth * 128;

struct HotKernels {
  const char* name;
  void (*dense)(const DenseJob&);
  void (*trellis)(const TrellisJob&);
  /// One 16×16 tile of the inner matrix as f32, out[k·stride + n].
  void (*decode_tile)(const uint16_t* tile, int bits, uint32_t codebook, float* out, int64_t stride);
  /// Orthonormal Hadamard transform of each 128-block of n values in place.
  void (*hadamard)(float* v, int64_t n);
  /// Σ v[i]², eight lanes and their tree.
  float (*square_sum)(const float* v, int64_t n);
};

/// The best variant of this machine.
const HotKernels& hot_kernels();
/// Every variant this machine can run; tests compare them.
std::span<const HotKernels* const> hot_variants();

}  // namespace glm53::cpu
