// Bodies of the hot kernels for one instruction set; included by hot_base.cpp and hot_avx2.cpp, see simd.h for the rule
// on inline functions.
#pragma once

#include "kernels/cpu/hot.h"
#include "kernels/cpu/simd.h"

namespace glm53::cpu::GLM53_SIMD {

inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// ---- dense

/// acc[r][o] += over depth of x[r]·w[o], eight lanes each. Ahead: the weights come from memory, once and in order, so
/// those of the next tile are asked for here; asking past the end does nothing.
template <int Rows, int Outs, bool Ahead, class W>
inline void dense_tile(const W* w, int64_t w_stride, const float* x, int64_t x_stride, int64_t depth,
                       F8 (&acc)[Rows][Outs]) {
  const int64_t whole = depth / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    F8 xs[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) xs[r] = load(x + r * x_stride + i);
#pragma GCC unroll 4
    for (int o = 0; o < Outs; ++o) {
      if constexpr (Ahead) __builtin_prefetch(w + (o + Outs) * w_stride + i);
      const F8 ws = load(w + o * w_stride + i);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) acc[r][o] = fma(xs[r], ws, acc[r][o]);
    }
  }
  if (whole == depth) return;
#pragma GCC unroll 4
  for (int o = 0; o < Outs; ++o) {
    const F8 ws = load_head(w + o * w_stride + whole, depth - whole);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) acc[r][o] = fma(load_head(x + r * x_stride + whole, depth - whole), ws, acc[r][o]);
  }
}

inline void put(const DenseJob& job, int64_t r, int64_t o, float value) {
  float& y = job.y[r * job.y_stride + o];
  y = job.beta == 0 ? value : value + job.beta * y;
}
/// Four neighbouring outputs at once, or the sums cost more than short dot products.
inline void put_four(const DenseJob& job, int64_t r, int64_t o, const F8* acc) {
  float sums[4];
  sum4(acc, sums);
  if (job.beta == 0) {
    std::memcpy(job.y + r * job.y_stride + o, sums, sizeof sums);
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) put(job, r, o + i, sums[i]);
}
template <int Outs>
inline void put_sums(const DenseJob& job, int64_t r, int64_t o, const F8* acc) {
  int j = 0;
#pragma GCC unroll 2
  for (; j + 4 <= Outs; j += 4) put_four(job, r, o + j, acc + j);
#pragma GCC unroll 4
  for (; j < Outs; ++j) put(job, r, o + j, sum(acc[j]));
}

/// Few rows: weights are read where they are.
template <int Rows, int Outs, class W>
inline void dense_direct_tile(const DenseJob& job, int64_t r, int64_t o) {
  F8 acc[Rows][Outs] = {};
  dense_tile<Rows, Outs, true>(static_cast<const W*>(job.w) + o * job.in, job.in, job.x + r * job.x_stride,
                               job.x_stride, job.in, acc);
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) put_sums<Outs>(job, r + i, o, acc[i]);
}

template <int Outs, class W>
inline void dense_direct_rows(const DenseJob& job, int64_t o) {
  if (job.rows == 4 && Outs == 4) {  // 3 + 1 would widen the weights twice; 4 × 4 sums leave no register
    dense_direct_tile<4, 2, W>(job, 0, o);
    return dense_direct_tile<4, 2, W>(job, 0, o + 2);
  }
  int64_t r = 0;
  for (; r + 3 <= job.rows; r += 3) dense_direct_tile<3, Outs, W>(job, r, o);
  if (job.rows - r == 2) dense_direct_tile<2, Outs, W>(job, r, o);
  if (job.rows - r == 1) dense_direct_tile<1, Outs, W>(job, r, o);
}

template <class W>
inline void dense_direct(const DenseJob& job) {
  int64_t o = job.out_begin;
  if (job.rows == 1) {
    for (; o + 8 <= job.out_end; o += 8) dense_direct_tile<1, 8, W>(job, 0, o);
  }
  for (; o + 4 <= job.out_end; o += 4) dense_direct_rows<4, W>(job, o);
  for (; o < job.out_end; ++o) dense_direct_rows<1, W>(job, o);
}

/// One piece of a panel: rows [r, r + Rows) times four outputs over one depth block, lanes carried in memory between
/// blocks.
template <int Rows>
inline void dense_panel_tile(const float* panel, const float* x, int64_t x_stride, int64_t depth, float* lanes,
                             bool first) {
  F8 acc[Rows][4] = {};
  if (!first) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int o = 0; o < 4; ++o) acc[r][o] = load(lanes + (r * kPanelOuts + o) * 8);
    }
  }
  dense_tile<Rows, 4, false>(panel, kPanelDepth, x, x_stride, depth, acc);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int o = 0; o < 4; ++o) store(lanes + (r * kPanelOuts + o) * 8, acc[r][o]);
  }
}

/// Widens outputs [o, o + outs) over depth [k, k + depth) into the panel; outputs past the end are zero.
template <class W>
inline void fill_panel(const DenseJob& job, int64_t o, int64_t outs, int64_t k, int64_t depth, float* panel) {
  for (int64_t j = 0; j < kPanelOuts; ++j) {
    float* to = panel + j * kPanelDepth;
    if (j >= outs) {
      std::memset(to, 0, static_cast<size_t>(depth) * sizeof(float));
      continue;
    }
    const W* from = static_cast<const W*>(job.w) + (o + j) * job.in + k;
    int64_t i = 0;
    for (; i + 8 <= depth; i += 8) store(to + i, load(from + i));
    if (i < depth) {
      float tail[8];
      store(tail, load_head(from + i, depth - i));
      std::memcpy(to + i, tail, static_cast<size_t>(depth - i) * sizeof(float));
    }
  }
}

/// Many rows: eight weight rows at a time are widened once and used for all rows of the block.
template <class W>
inline void dense_panels(const DenseJob& job, int64_t row_begin, int64_t rows) {
  float* panel = job.scratch;
  float* lanes = panel + kPanelOuts * kPanelDepth;
  for (int64_t o = job.out_begin; o < job.out_end; o += kPanelOuts) {
    const int64_t outs = smaller(kPanelOuts, job.out_end - o);
    for (int64_t k = 0; k < job.in; k += kPanelDepth) {
      const int64_t depth = smaller(kPanelDepth, job.in - k);
      fill_panel<W>(job, o, outs, k, depth, panel);
      for (int64_t r = 0; r < rows; r += 3) {
        const float* x = job.x + (row_begin + r) * job.x_stride + k;
        for (int64_t half = 0; half < outs; half += 4) {
          float* at = lanes + (r * kPanelOuts + half) * 8;
          const float* part = panel + half * kPanelDepth;
          if (rows - r >= 3) dense_panel_tile<3>(part, x, job.x_stride, depth, at, k == 0);
          if (rows - r == 2) dense_panel_tile<2>(part, x, job.x_stride, depth, at, k == 0);
          if (rows - r == 1) dense_panel_tile<1>(part, x, job.x_stride, depth, at, k == 0);
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      F8 acc[kPanelOuts];
      for (int64_t j = 0; j < outs; ++j) acc[j] = load(lanes + (r * kPanelOuts + j) * 8);
      int64_t j = 0;
      for (; j + 4 <= outs; j += 4) put_four(job, row_begin + r, o + j, acc + j);
      for (; j < outs; ++j) put(job, row_begin + r, o + j, sum(acc[j]));
    }
  }
}

template <class W>
inline void dense_of(const DenseJob& job) {
  if (job.rows <= 6 || job.in == 0) return dense_direct<W>(job);
  for (int64_t r = 0; r < job.rows; r += kDenseRows) dense_panels<W>(job, r, smaller(kDenseRows, job.rows - r));
}

void dense(const DenseJob& job) {
  if (job.bf16) {
    dense_of<uint16_t>(job);
  } else {
    dense_of<float>(job);
  }
}

// ---- EXL3

/// Rounds to the eleven significant bits of fp16, to nearest even. Codebook values never fall below fp16's normal
/// range.
inline F8 round_to_half(F8 v) {
  const U8 u = as_uint(v);
  return as_float((u + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u);
}

/// Codebook values of eight states (spec exl3 §2). The addends are fp16 normals, so widening is a shift and a bias, and
/// the sum is exact.
template <uint32_t Codebook>
inline F8 codes_of(U8 state) {
  if constexpr (Codebook == 2) {
    const U8 p = state * 0x83dcd12du;
    const U8 pairs = (p & 0x00ff00ffu) + ((p >> 8) & 0x00ff00ffu);
    const F8 h = to_float(((pairs & 0xffffu) + (pairs >> 16)) + 1024u);
    return round_to_half(h * broadcast(0.00676727294921875f) + broadcast(-10.3828125f));
  } else {
    const U8 p = Codebook == 1 ? state * 0xcbac1fedu : state * 89226354u + 64248484u;
    const U8 q = (p & 0x8fff8fffu) ^ 0x3b603b60u;
    const U8 low = ((q << 16) & 0x80000000u) | (((q & 0x7fffu) << 13) + 0x38000000u);
    const U8 high = (q & 0x80000000u) | (((q >> 3) & 0x0fffe000u) + 0x38000000u);
    return round_to_half(as_float(low) + as_float(high));
  }
}

/// Eight tile columns at a time: element i = 32·g + 8·q + j sits in row 2q + (j&1) + 8·((j>>1)&1) and column g +
/// 8·(j>>2), and the bit where its window ends is 32·g·K + (8q + j + 1)·K, so for fixed (q, j) all eight g need the
/// same shift of words K apart.
template <int K, uint32_t Codebook>
inline void decode(const uint16_t* tile, float* out, int64_t stride) {
  uint32_t words[8 * K];
  std::memcpy(words, tile, sizeof words);
  U8 word[K + 1];  // word[c + 1]: words g·K + c; word[0]: the word before, of the group before
#pragma GCC unroll 8
  for (int c = 0; c < K; ++c) word[c + 1] = gather(words + c, K);
  word[0] = rotate_up(word[K]);
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const int end = (8 * q + j + 1) * K;
      const int low = (end - 1) / 32, high = (end + 16) / 32 - 1;
      const int shift = (32 - end % 32) % 32;
      U8 state = word[low + 1] >> shift;
      if (high != low) state = state | (word[high + 1] << (32 - shift));
      const int row = 2 * q + (j & 1) + 8 * ((j >> 1) & 1);
      store(out + row * stride + 8 * (j >> 2), codes_of<Codebook>(state & 0xffffu));
    }
  }
}

template <uint32_t Codebook>
inline void decode_bits(const uint16_t* tile, int bits, float* out, int64_t stride) {
  switch (bits) {
    case 1:
      return decode<1, Codebook>(tile, out, stride);
    case 2:
      return decode<2, Codebook>(tile, out, stride);
    case 3:
      return decode<3, Codebook>(tile, out, stride);
    case 4:
      return decode<4, Codebook>(tile, out, stride);
    case 5:
      return decode<5, Codebook>(tile, out, stride);
    case 6:
      return decode<6, Codebook>(tile, out, stride);
    case 7:
      return decode<7, Codebook>(tile, out, stride);
    default:
      return decode<8, Codebook>(tile, out, stride);
  }
}

void decode_tile(const uint16_t* tile, int bits, uint32_t codebook, float* out, int64_t stride) {
  if (codebook == 0) return decode_bits<0>(tile, bits, out, stride);
  if (codebook == 1) return decode_bits<1>(tile, bits, out, stride);
  return decode_bits<2>(tile, bits, out, stride);
}

/// Rows × 8·Vectors outputs over one decoded depth block.
template <int Rows, int Vectors>
inline void trellis_tile(const float* const* x, int64_t k, const float* panel, float* t) {
  F8 acc[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) acc[r][v] = load(t + r * 128 + 8 * v);
  }
  for (int64_t i = 0; i < kTrellisDepth; ++i) {
    F8 w[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) w[v] = load(panel + i * 128 + 8 * v);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const F8 xs = broadcast(x[r][k + i]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(xs, w[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(t + r * 128 + 8 * v, acc[r][v]);
  }
}

template <int Rows, int Vectors>
inline void trellis_row_tiles(const float* const* x, int64_t k, const float* panel, float* t) {
  for (int64_t n = 0; n < 128; n += 8 * Vectors) trellis_tile<Rows, Vectors>(x, k, panel + n, t + n);
}

void trellis(const TrellisJob& job) {
  const int64_t tiles = job.out / 16, words = 16 * job.bits;
  std::memset(job.t, 0, static_cast<size_t>(job.rows) * 128 * sizeof(float));
  for (int64_t k = 0; k < job.in; k += kTrellisDepth) {
    for (int64_t tk = 0; tk < kTrellisDepth / 16; ++tk) {
      const uint16_t* strip = job.codes + ((k / 16 + tk) * tiles + job.block * 8) * words;
      for (int64_t tn = 0; tn < 8; ++tn) {
        decode_tile(strip + tn * words, job.bits, job.codebook, job.scratch + tk * 16 * 128 + tn * 16, 128);
      }
    }
    int64_t r = 0;
    for (; r + 6 <= job.rows; r += 6) trellis_row_tiles<6, 2>(job.x + r, k, job.scratch, job.t + r * 128);
    for (; r + 3 <= job.rows; r += 3) trellis_row_tiles<3, 4>(job.x + r, k, job.scratch, job.t + r * 128);
    for (; r < job.rows; ++r) trellis_row_tiles<1, 8>(job.x + r, k, job.scratch, job.t + r * 128);
  }
}

// ---- small pieces

inline void hadamard_block(float* v) {
  for (int i = 0; i < 128; i += 8) store(v + i, hadamard8(load(v + i)));  // distances 1, 2, 4
  for (int half = 8; half < 128; half *= 2) {
    for (int base = 0; base < 128; base += 2 * half) {
      for (int l = base; l < base + half; l += 8) {
        const F8 p = load(v + l), q = load(v + l + half);
        store(v + l, p + q);
        store(v + l + half, p - q);
      }
    }
  }
  const F8 scale = broadcast(0.08838834764831845f);  // 1/√128
  for (int i = 0; i < 128; i += 8) store(v + i, load(v + i) * scale);
}

void hadamard(float* v, int64_t n) {
  for (int64_t i = 0; i + 128 <= n; i += 128) hadamard_block(v + i);
}

float square_sum(const float* v, int64_t n) {
  F8 acc = zero();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const F8 x = load(v + i);
    acc = fma(x, x, acc);
  }
  if (i < n) {
    const F8 x = load_head(v + i, n - i);
    acc = fma(x, x, acc);
  }
  return sum(acc);
}

}  // namespace glm53::cpu::GLM53_SIMD
