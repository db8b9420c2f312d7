// Kimi delta attention in chunks of the absolute grid of 64 (spec model §4.1, runtime §3.4), on tensor cores. With G
// the cumulative log decay inside a chunk, k̂ and q̂ the normalised keys and queries and S the state before it:
//   L = β_i k̂_i·k̂_m e^(G_i − G_m), m < i      T = (I + L)^-1        W = T (β k̂ e^G)     U = T (β v)
//   δ = U − W S      out = (q̂ e^G) S + A δ, A = q̂_i·k̂_m e^(G_i − G_m), m ≤ i      S' = e^(G_last) S + (k̂ e^(G_last −
//   G))ᵀ δ
// What does not need S is worked out for all chunks at once (`prepare`) and left in memory as tensor-core fragments,
// some chunks at a time so that it stays in the second-level cache; then `advance` walks the chunks with the state in
// registers, f32; 32 value columns a block. L and W, U take tf32, T is f32 (forward substitution), products with S and
// δ are bf16 with f32 sums. Exponents are taken from the first row of sub-blocks of 16, so none is large.
//
// A state that is wanted after rows inside a chunk is a chunk of its own, of those rows, whose result is saved and
// dropped: the same bits as a piece that ends there.
#include <algorithm>

#include "kernels/batch.h"
#include "kernels/cuda/kda.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/runtime.h"

namespace glm53::cuda {
namespace {

constexpr int kChunk = 64, kSub = 16, kThreads = 256, kWarps = 8;
constexpr int kLowStride = kChunk + 8;              // of L and T in shared memory
constexpr int kTileColumns = 32, kTileStride = 40;  // of S and δ in shared memory
constexpr size_t kRoom = size_t{24} << 20;          // bytes of fragments at a time
constexpr float kLog2e = 1.4426950408889634F, kLargestExponent = 80.0F;

/// Where the parts of a prepared chunk of one head lie, in units of 16 bytes.
template <int kDim>
struct Layout {
  static constexpr int kSteps = kDim / 16;
  static constexpr int kW = 0, kQ = kW + 4 * kSteps * 32, kKeys = kQ + 4 * kSteps * 32, kMix = kKeys + kSteps * 4 * 32,
                       kU = kMix + 16 * 32, kDecay = kU + 4 * (kDim / 8) * 32, kSize = kDecay + kDim / 4;
};
size_t bytes_of(int dim) {
  return 16 * static_cast<size_t>(dim == 64 ? Layout<64>::kSize : Layout<128>::kSize);
}
int64_t items_at_once(const KdaView& c) {
  return std::max<int64_t>(4, static_cast<int64_t>(kRoom / (bytes_of(c.dim) * static_cast<size_t>(c.heads))));
}

/// A chunk, or the first rows of one after which the state is saved.
struct Item {
  int64_t row, end;  ///< its first row; the position after its last
  int rows, snap;    ///< snap ≥ 0: save the state there and go back
};

/// The chunks of a sequence, and the exports inside of them.
struct Pieces {
  int64_t row = 0, position = 0, end = 0;
  int64_t inside[2] = {};  ///< positions of exports inside chunks, ascending
  int snaps[2] = {};
  int n_inside = 0, count = 0;

  __device__ Pieces(const KdaView& c, const Rows& b, int64_t seq) {
    const int64_t rows = b.row_begin[seq + 1] - b.row_begin[seq];
    if (b.slot[seq] < 0 || rows <= 0) return;
    row = b.row_begin[seq];
    position = b.position[row];
    end = position + rows;
    if (b.export_pos != nullptr && c.snap_state != nullptr) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t p = b.export_pos[2 * seq + e], snap = b.export_snap[2 * seq + e];
        if (p <= position || p >= end || p % kChunk == 0 || snap < 0 || snap >= c.snaps) continue;
        const bool before = n_inside == 1 && p < inside[0];
        inside[1] = before ? inside[0] : p;
        snaps[1] = before ? snaps[0] : static_cast<int>(snap);
        if (n_inside == 0 || before) {
          inside[0] = p;
          snaps[0] = static_cast<int>(snap);
        }
        ++n_inside;
      }
    }
    count = static_cast<int>((end - 1) / kChunk - position / kChunk + 1) + n_inside;
  }
  __device__ Item at(int i) const {
    int chunk = i, snap = -1;
    int64_t until = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // export e is item number (its chunk) + e
      if (e >= n_inside) break;
      const int here = static_cast<int>(inside[e] / kChunk - position / kChunk) + e;
      if (here == i) {
        snap = snaps[e];
        until = inside[e];
      }
      if (here < i) --chunk;
    }
    if (snap >= 0) chunk = static_cast<int>(until / kChunk - position / kChunk);
    const int64_t begin = max(position, (position / kChunk + chunk) * kChunk);
    const int64_t stop = snap >= 0 ? until : min(end, (position / kChunk + chunk + 1) * kChunk);
    return {row + begin - position, stop, static_cast<int>(stop - begin), snap};
  }
};

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ inline float low_of(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}

template <int kDim>
struct Shared {
  static constexpr int kWide = kDim + 8;
  uint16_t k[kChunk][kWide], q[kChunk][kWide];  ///< raw; q makes room for v
  float sum[kChunk][kWide];                     ///< G in units of log 2
  float low[kChunk][kLowStride];                ///< L below the diagonal, the transpose of T from it on
  float total[kThreads], beta[kChunk], k_norm[kChunk], q_norm[kChunk];

  __device__ uint32_t pair(const uint16_t (&m)[kChunk][kWide], int row, int channel) const {
    return *reinterpret_cast<const uint32_t*>(&m[row][channel]);
  }
  __device__ float2 sums(int row, int channel) const { return *reinterpret_cast<const float2*>(&sum[row][channel]); }
};

/// Raw rows, norms, β, and log decays summed down the rows. Rows that are none are zeros.
template <int kDim>
__device__ void read_rows(const KdaView& c, const KdaRows& in, const Item& item, int64_t head, Shared<kDim>& s) {
  constexpr int kEach = kDim / 32, kWords = kEach / 2;  // channels and words of a lane
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int channel = kEach * lane;
  const float rate = expf(at(c.a_log, head));
  float bias[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) bias[i] = at(c.dt_bias, head * kDim + channel + i);
  const auto words = [&](const Matrix& m, int64_t row, uint32_t(&v)[kWords]) {
    const auto* from = static_cast<const uint16_t*>(m.data) + row * m.stride + head * kDim + channel;
#pragma unroll
    for (int i = 0; i < kWords; ++i) v[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
  };
  constexpr int kBatch = 4;
#pragma unroll
  for (int first = 0; first < kChunk; first += kBatch * kWarps) {
    uint32_t k[kBatch][kWords], q[kBatch][kWords], gate[kBatch][kWords];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {  // all reads first; rows past the end read the last one
      const int64_t row = item.row + min(first + i * kWarps + warp, item.rows - 1);
      words(in.k, row, k[i]);
      words(in.q, row, q[i]);
      words(in.gate, row, gate[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = first + i * kWarps + warp;
      const bool live = r < item.rows;
      float k_squares = 0, q_squares = 0;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const uint32_t kw = live ? k[i][j] : 0, qw = live ? q[i][j] : 0;
        k_squares = fmaf(low_of(kw), low_of(kw), fmaf(high_of(kw), high_of(kw), k_squares));
        q_squares = fmaf(low_of(qw), low_of(qw), fmaf(high_of(qw), high_of(qw), q_squares));
        *reinterpret_cast<uint32_t*>(&s.k[r][channel + 2 * j]) = kw;
        *reinterpret_cast<uint32_t*>(&s.q[r][channel + 2 * j]) = qw;
        const auto decay = [&](float raw, float b) {
          return live ? __fdividef(kLog2e * c.lower, 1.0F + power_of_two(-kLog2e * rate * (raw + b))) : 0.0F;
        };
        *reinterpret_cast<float2*>(&s.sum[r][channel + 2 * j]) = {decay(low_of(gate[i][j]), bias[2 * j]),
                                                                  decay(high_of(gate[i][j]), bias[2 * j + 1])};
      }
      k_squares = warp_sum(k_squares);
      q_squares = warp_sum(q_squares);
      if (lane == 0) {
        s.k_norm[r] = rsqrtf(k_squares + 1e-6F);
        s.q_norm[r] = rsqrtf(static_cast<float>(kDim)) * rsqrtf(q_squares + 1e-6F);
      }
    }
  }
  if (threadIdx.x < kChunk) {
    const int r = static_cast<int>(threadIdx.x);
    s.beta[r] = r < item.rows ? sigmoid(at(in.beta, item.row + r, head)) : 0.0F;
  }
  __syncthreads();
  constexpr int kParts = kThreads / kDim, kRows = kChunk / kParts;
  const int a = static_cast<int>(threadIdx.x) % kDim, part = static_cast<int>(threadIdx.x) / kDim;
  float sums[kRows], total = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    total += s.sum[part * kRows + r][a];
    sums[r] = total;
  }
  s.total[threadIdx.x] = total;
  __syncthreads();
  float before = 0;
  for (int p = 0; p < part; ++p) before += s.total[p * kDim + a];
#pragma unroll
  for (int r = 0; r < kRows; ++r) s.sum[part * kRows + r][a] = before + sums[r];
  __syncthreads();
}

/// L into shared memory and A as fragments. A warp has 16 rows and, of each earlier 16 rows, eight.
template <int kDim>
__device__ void coefficients(Shared<kDim>& s, uint4* item) {
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2, t = lane & 3, half = warp >> 2, block = half == 0 ? warp : 7 - warp;
  const int i0 = kSub * block + g, i1 = i0 + 8;
  const float k0 = s.k_norm[i0] * s.beta[i0], k1 = s.k_norm[i1] * s.beta[i1], q0 = s.q_norm[i0], q1 = s.q_norm[i1];
  float low[4][4] = {}, mix[4][4] = {};
  for (int step = 0; step < kDim / 8; ++step) {
    const int channel = 8 * step + 2 * t;
    const float2 base = s.sums(kSub * block, channel), s0 = s.sums(i0, channel), s1 = s.sums(i1, channel);
    const float e00 = power_of_two(s0.x - base.x), e01 = power_of_two(s0.y - base.y);
    const float e10 = power_of_two(s1.x - base.x), e11 = power_of_two(s1.y - base.y);
    const uint32_t ka = s.pair(s.k, i0, channel), kb = s.pair(s.k, i1, channel);
    const uint32_t qa = s.pair(s.q, i0, channel), qb = s.pair(s.q, i1, channel);
    const uint32_t k[4] = {tf32(low_of(ka) * k0 * e00), tf32(low_of(kb) * k1 * e10), tf32(high_of(ka) * k0 * e01),
                           tf32(high_of(kb) * k1 * e11)};
    const uint32_t q[4] = {tf32(low_of(qa) * q0 * e00), tf32(low_of(qb) * q1 * e10), tf32(high_of(qa) * q0 * e01),
                           tf32(high_of(qb) * q1 * e11)};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c > block) break;
      const int m = kSub * c + 8 * half + g;
      const float2 sm = s.sums(m, channel);
      const uint32_t right = s.pair(s.k, m, channel);
      const uint32_t b0 = tf32(low_of(right) * s.k_norm[m] * power_of_two(base.x - sm.x));
      const uint32_t b1 = tf32(high_of(right) * s.k_norm[m] * power_of_two(base.y - sm.y));
      mma_tf32(low[c], k[0], k[1], k[2], k[3], b0, b1);
      mma_tf32(mix[c], q[0], q[1], q[2], q[3], b0, b1);
    }
  }
  auto* const to = reinterpret_cast<uint2*>(item + Layout<kDim>::kMix);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c > block) break;
    const int m = kSub * c + 8 * half + 2 * t;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = j < 2 ? i0 : i1, column = m + (j & 1);
      if (column < i) s.low[i][column] = low[c][j];
      if (column > i) mix[c][j] = 0;
    }
    to[((block * 4 + c) * 32 + lane) * 2 + half] = {pack(mix[c][0], mix[c][1]), pack(mix[c][2], mix[c][3])};
  }
}

/// Column `j` of T = (I + L)^-1 by forward substitution, 16 rows at a time, into row j of the upper triangle: L below
/// the diagonal stays. Rounded to tf32 at the end.
__device__ void invert_column(float (&low)[kChunk][kLowStride], int j) {
  const auto mine = [&](int m) {  // T[m][j] … T[m + 3][j]
    float4 x = *reinterpret_cast<const float4*>(&low[j][m]);
    x.x = m >= j ? x.x : 0.0F;
    x.y = m + 1 >= j ? x.y : 0.0F;
    x.z = m + 2 >= j ? x.z : 0.0F;
    x.w = m + 3 >= j ? x.w : 0.0F;
    return x;
  };
#pragma unroll 1
  for (int block = 0; block < kChunk; block += kSub) {
    float sum[kSub] = {};
#pragma unroll 1
    for (int m = 0; m < block; m += 4) {
      const float4 x = mine(m);
#pragma unroll
      for (int r = 0; r < kSub; ++r) {
        const float4 l = *reinterpret_cast<const float4*>(&low[block + r][m]);
        sum[r] = fmaf(l.x, x.x, fmaf(l.y, x.y, fmaf(l.z, x.z, fmaf(l.w, x.w, sum[r]))));
      }
    }
    float x[kSub];
#pragma unroll
    for (int r = 0; r < kSub; ++r) {
      float more = sum[r];
#pragma unroll
      for (int q = 0; q < r; ++q) more = fmaf(low[block + r][block + q], x[q], more);
      x[r] = (block + r == j ? 1.0F : 0.0F) - more;
    }
#pragma unroll
    for (int r = 0; r < kSub; ++r) {
      if (block + r >= j) low[j][block + r] = x[r];
    }
  }
  for (int m = j; m < kChunk; ++m) low[j][m] = __uint_as_float(tf32(low[j][m]));
}

/// q̂ e^G, (k̂ e^(G_last − G))ᵀ and e^(G_last), by the warps from `first` on.
template <int kDim>
__device__ void decayed(const Shared<kDim>& s, uint4* item, int first) {
  using At = Layout<kDim>;
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5) - first;
  const int g = lane >> 2, t = lane & 3;
  for (int i = warp; i < 4 * At::kSteps; i += kWarps - first) {
    const int row = 16 * (i / At::kSteps) + g, channel = 16 * (i % At::kSteps) + 2 * t;
    const auto two = [&](int r, int a) {
      const uint32_t q = s.pair(s.q, r, a);
      const float2 sum = s.sums(r, a);
      return pack(low_of(q) * s.q_norm[r] * power_of_two(sum.x), high_of(q) * s.q_norm[r] * power_of_two(sum.y));
    };
    item[At::kQ + i * 32 + lane] = {two(row, channel), two(row + 8, channel), two(row, channel + 8),
                                    two(row + 8, channel + 8)};
  }
  for (int i = warp; i < At::kSteps * 4; i += kWarps - first) {
    const int key = 16 * (i / 4) + g, row = 16 * (i % 4) + 2 * t;
    const auto one = [&](int a, int m) {
      return low_of(s.k[m][a]) * s.k_norm[m] * power_of_two(s.sum[kChunk - 1][a] - s.sum[m][a]);
    };
    const auto two = [&](int a, int m) { return pack(one(a, m), one(a, m + 1)); };
    item[At::kKeys + i * 32 + lane] = {two(key, row), two(key + 8, row), two(key, row + 8), two(key + 8, row + 8)};
  }
  auto* const decay = reinterpret_cast<float*>(item + At::kDecay);
  for (int a = 32 * warp + lane; a < kDim; a += 32 * (kWarps - first)) decay[a] = power_of_two(s.sum[kChunk - 1][a]);
}

/// W (the first four warps) or U (the others) as fragments. T is rounded to tf32 already.
template <int kDim, bool kIsW>
__device__ void solve(const Shared<kDim>& s, uint4* item) {
  using At = Layout<kDim>;
  constexpr int kTiles = kDim / 32;  // of eight columns
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2, t = lane & 3, tile = (warp & 3) * kTiles;
  float acc[4][kTiles][4] = {};
#pragma unroll 1
  for (int step = 0; step < kChunk / 8; ++step) {
    const int m0 = 8 * step + 2 * t, m1 = m0 + 1;
    uint32_t a[4][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (r < step / 2) continue;  // above the diagonal
      const int i = 16 * r + g;
      const auto entry = [&](int row, int m) { return m <= row ? __float_as_uint(s.low[m][row]) : 0; };
      a[r][0] = entry(i, m0);
      a[r][1] = entry(i + 8, m0);
      a[r][2] = entry(i, m1);
      a[r][3] = entry(i + 8, m1);
    }
    const float scale0 = s.beta[m0] * (kIsW ? s.k_norm[m0] : 1.0F), scale1 = s.beta[m1] * (kIsW ? s.k_norm[m1] : 1.0F);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int channel = 8 * (tile + n) + g;
      float v0 = 0, v1 = 0;
      if constexpr (kIsW) {
        v0 = low_of(s.k[m0][channel]) * power_of_two(s.sum[m0][channel]);
        v1 = low_of(s.k[m1][channel]) * power_of_two(s.sum[m1][channel]);
      } else {
        v0 = low_of(s.q[m0][channel]);  // v by now
        v1 = low_of(s.q[m1][channel]);
      }
      const uint32_t b0 = tf32(v0 * scale0), b1 = tf32(v1 * scale1);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (r >= step / 2) mma_tf32(acc[r][n], a[r][0], a[r][1], a[r][2], a[r][3], b0, b1);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if constexpr (kIsW) {
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        item[At::kW + (r * At::kSteps + (tile + n) / 2) * 32 + lane] = {
            pack(acc[r][n][0], acc[r][n][1]), pack(acc[r][n][2], acc[r][n][3]),
            pack(acc[r][n + 1][0], acc[r][n + 1][1]), pack(acc[r][n + 1][2], acc[r][n + 1][3])};
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        *reinterpret_cast<float4*>(item + At::kU + (r * (kDim / 8) + tile + n) * 32 + lane) = {
            acc[r][n][0], acc[r][n][1], acc[r][n][2], acc[r][n][3]};
      }
    }
  }
}

/// Block (item, head): everything of a chunk that does not need the state.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    prepare(KdaView c, Rows b, KdaRows in, int32_t first_seq, int32_t seqs, int32_t first_item, uint4* room) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<Shared<kDim>*>(memory);
  __shared__ Item item;
  __shared__ bool live;
  after_previous();
  const int64_t head = blockIdx.y;
  if (threadIdx.x == 0) {
    live = false;
    int index = first_item + static_cast<int>(blockIdx.x);
    for (int seq = 0; seq < seqs; ++seq) {
      const Pieces pieces(c, b, first_seq + seq);
      if (index < pieces.count) {
        item = pieces.at(index);
        live = true;
        break;
      }
      index -= pieces.count;
    }
  }
  __syncthreads();
  if (!live) return;
  uint4* const to = room + (blockIdx.x * c.heads + head) * Layout<kDim>::kSize;
  read_rows<kDim>(c, in, item, head, s);
  coefficients<kDim>(s, to);
  __syncthreads();
  constexpr int kPieces = kChunk * kDim / 8 / kThreads;  // of v, eight values each
  uint4 v[kPieces];
  const auto read_values = [&] {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / (kDim / 8), channel = at % (kDim / 8) * 8;
      const auto* from =
          static_cast<const uint16_t*>(in.v.data) + (item.row + row) * in.v.stride + head * kDim + channel;
      v[i] = row < item.rows ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
    }
  };
  constexpr int kColumnWarps = kChunk / 32;
  if (threadIdx.x < kChunk) {
    invert_column(s.low, static_cast<int>(threadIdx.x));
    read_values();
  } else {
    read_values();
    decayed<kDim>(s, to, kColumnWarps);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / (kDim / 8), channel = at % (kDim / 8) * 8;
    *reinterpret_cast<uint4*>(&s.q[row][channel]) = v[i];
  }
  __syncthreads();
  if (threadIdx.x < kThreads / 2) {
    solve<kDim, true>(s, to);
  } else {
    solve<kDim, false>(s, to);
  }
}

/// What a warp needs of a prepared chunk: 16 rows of W (warps 0–3) or of the queries (4–7), 16 keys, and U or A.
template <int kDim>
struct Operands {
  static constexpr int kSteps = kDim / 16;
  uint4 left[kSteps], keys[4], more[4];
  float decay[2];

  __device__ void read(const uint4* item, int warp, int lane, int column_tile) {
    using At = Layout<kDim>;
    const int block = warp & 3;
    const uint4* from = item + (warp < 4 ? At::kW : At::kQ) + block * kSteps * 32 + lane;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) left[i] = from[i * 32];
    const uint4* rest =
        item + (warp < 4 ? At::kU + (block * (kDim / 8) + column_tile) * 32 : At::kMix + block * 4 * 32) + lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) more[i] = warp < 4 || i <= block ? rest[i * 32] : uint4{};
    if (warp < kSteps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) keys[i] = item[At::kKeys + (warp * 4 + i) * 32 + lane];
      const auto* decays = reinterpret_cast<const float*>(item + At::kDecay) + 16 * warp + (lane >> 2);
      decay[0] = decays[0];
      decay[1] = decays[8];
    }
  }
};

using Tile = __nv_bfloat16[kTileStride];

/// acc += left · tile rows [16 step, …) of 32 columns.
__device__ void multiply(const uint4& left, const Tile* tile, int step, float (&acc)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t b[4];
    load_matrix4_transposed(b, shared_address(&tile[16 * step + (lane & 15)][16 * n + 8 * (lane >> 4)]));
    mma_bf16(acc[2 * n], left.x, left.y, left.z, left.w, b[0], b[1]);
    mma_bf16(acc[2 * n + 1], left.x, left.y, left.z, left.w, b[2], b[3]);
  }
}
__device__ void write_tile(Tile* tile, int row, const float (&v)[4][4]) {
  const int t = static_cast<int>(threadIdx.x & 3U);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    *reinterpret_cast<uint32_t*>(&tile[row][8 * n + 2 * t]) = pack(v[n][0], v[n][1]);
    *reinterpret_cast<uint32_t*>(&tile[row + 8][8 * n + 2 * t]) = pack(v[n][2], v[n][3]);
  }
}

/// Two neighbouring outputs; rows are aligned to pairs.
__device__ void put_pair(const Matrix& m, int64_t row, int64_t column, const float* v) {
  if (m.bf16) {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(m.data) + row * m.stride + column) = pack(v[0], v[1]);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(m.data) + row * m.stride + column) = {v[0], v[1]};
  }
}

/// Block (sequence, head, 32 value columns): the chunks of a sequence that are prepared, one after the other.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    advance(KdaView c, Rows b, KdaRows in, int32_t first_seq, int32_t first_item, int32_t items, const uint4* room) {
  constexpr int kSteps = kDim / 16;
  __shared__ __align__(16) Tile state_tile[kDim];
  __shared__ __align__(16) Tile delta_tile[kChunk];
  after_previous();
  const int64_t seq = first_seq + int64_t{blockIdx.x}, head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.z) * kTileColumns;
  const Pieces pieces(c, b, seq);
  int begin = -first_item;  // of the sequence's items, in the prepared ones
  for (int64_t other = first_seq; other < seq; ++other) begin += Pieces(c, b, other).count;
  const int from = max(0, -begin), to = min(pieces.count, items - begin);
  if (from >= to) return;
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2, t = lane & 3, key = 16 * warp + g;
  const bool has_state = warp < kSteps;
  float s[4][4] = {};
  const auto each = [&](float* pool, int64_t id, const auto& body) {
    if (!has_state) return;
    float* p = state_of(c, pool, id, head) + int64_t{key} * kDim + first + 2 * t;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      body(*reinterpret_cast<float2*>(p + 8 * n), s[n][0], s[n][1]);
      body(*reinterpret_cast<float2*>(p + 8 * kDim + 8 * n), s[n][2], s[n][3]);
    }
  };
  const auto save = [&](float* pool, int64_t id) { each(pool, id, [](float2& at, float x, float y) { at = {x, y}; }); };
  const auto export_at = [&](int64_t position) {
    for (int e = 0; e < 2 && b.export_pos != nullptr && c.snap_state != nullptr; ++e) {
      const int64_t snap = b.export_snap[2 * seq + e];
      if (b.export_pos[2 * seq + e] == position && snap >= 0 && snap < c.snaps) save(c.snap_state, snap);
    }
  };
  each(c.state, b.slot[seq], [](const float2& at, float& x, float& y) {
    x = at.x;
    y = at.y;
  });
  if (from == 0) export_at(pieces.position);
  const auto item_at = [&](int i) { return room + ((begin + i) * c.heads + head) * Layout<kDim>::kSize; };
  Operands<kDim> now;
  now.read(item_at(from), warp, lane, first / 8);
  for (int i = from; i < to; ++i) {
    const Item item = pieces.at(i);  // before the reads: what it waits for must not wait for them
    Operands<kDim> next;
    if (i + 1 < to) next.read(item_at(i + 1), warp, lane, first / 8);
    if (has_state) write_tile(state_tile, key, s);
    __syncthreads();
    float acc[4][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) multiply(now.left[step], state_tile, step, acc);
    if (warp < 4) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 u = now.more[n];
        acc[n][0] = __uint_as_float(u.x) - acc[n][0];
        acc[n][1] = __uint_as_float(u.y) - acc[n][1];
        acc[n][2] = __uint_as_float(u.z) - acc[n][2];
        acc[n][3] = __uint_as_float(u.w) - acc[n][3];
      }
      write_tile(delta_tile, 16 * warp + g, acc);
    }
    __syncthreads();
    if (warp >= 4 && item.snap < 0) {
      const int block = warp - 4;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step <= block) multiply(now.more[step], delta_tile, step, acc);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * block + g + 8 * h;
          if (row < item.rows) put_pair(in.out, item.row + row, head * kDim + first + 8 * n + 2 * t, acc[n] + 2 * h);
        }
      }
    }
    if (has_state) {
      float after[4][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) after[n][j] = s[n][j] * now.decay[j >> 1];
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply(now.keys[step], delta_tile, step, after);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float before = s[n][j];
          s[n][j] = after[n][j];
          after[n][j] = before;
        }
      }
      if (item.snap >= 0) save(c.snap_state, item.snap);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[n][j] = item.snap >= 0 ? after[n][j] : s[n][j];
      }
    }
    if (item.snap < 0) export_at(item.end);
    now = next;
  }
  save(c.state, b.slot[seq]);
}

template <int kDim>
void launch(const KdaView& c, const Rows& b, const KdaRows& in, int32_t first_seq, int32_t seqs, uint4* room,
            cudaStream_t on) {
  const auto at_once = static_cast<int32_t>(items_at_once(c));
  // More than there can be: every sequence may begin and end inside a chunk, and export twice.
  const int32_t bound = (b.rows - b.window_rows) / kChunk + seqs * (b.export_pos != nullptr ? 4 : 2);
  constexpr size_t kShared = sizeof(Shared<kDim>);
  static_assert(kShared <= 98 << 10, "GB10 has 99 KiB of shared memory a block");
  check(cudaFuncSetAttribute(prepare<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "kda_chunk");
  for (int32_t first = 0; first < bound; first += at_once) {
    const int32_t items = std::min(at_once, bound - first);
    const auto u = [](int64_t n) { return static_cast<unsigned>(n); };
    launch_next_shared(prepare<kDim>, dim3(u(items), u(c.heads)), dim3(kThreads), kShared, on, c, b, in, first_seq,
                       seqs, first, room);
    launch_next(advance<kDim>, dim3(u(seqs), u(c.heads), kDim / kTileColumns), dim3(kThreads), on, c, b, in, first_seq,
                first, items, room);
  }
}

bool aligned(const Matrix& m) {
  return m.stride % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

}  // namespace

size_t chunk_room(const KdaView& c) {
  if (c.dim != 64 && c.dim != 128) return 0;
  return static_cast<size_t>(items_at_once(c)) * static_cast<size_t>(c.heads) * bytes_of(c.dim);
}

bool run_chunks(const KdaView& c, const Rows& b, const KdaRows& in, int32_t first_seq, int32_t seqs, void* room,
                cudaStream_t on) {
  if ((c.dim != 64 && c.dim != 128) || -c.lower * static_cast<float>(kSub - 1) > kLargestExponent) return false;
  if (!in.k.bf16 || !aligned(in.q) || !aligned(in.k) || !aligned(in.v) || !aligned(in.gate) || !aligned(in.out)) {
    return false;
  }
  if (c.dim == 64) {
    launch<64>(c, b, in, first_seq, seqs, static_cast<uint4*>(room), on);
  } else {
    launch<128>(c, b, in, first_seq, seqs, static_cast<uint4*>(room), on);
  }
  return true;
}

}  // namespace glm53::cuda
