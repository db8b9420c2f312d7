// Absorbed latent attention on tensor cores, for bf16 activations: 64 selected tokens at a time are decoded into shared
// memory once and serve all heads, first as keys, then as values (spec model §5.1, runtime §2.1–2.3).
//
// Window rows: a block has 64 tokens of one row, its result is joined with the others' by `join`. Chunk rows: a block
// goes through all tokens of its row with a running maximum. Pieces of 64 tokens follow from the row's context alone.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/latent.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"

namespace glm53::cuda {
namespace {

constexpr int kPiece = 64;  // tokens
constexpr int kHeads = 32;  // of a block
constexpr int kWarps = 8;   // each has 8 tokens of the scores and every eighth 16 columns of the sums
constexpr int kMaxLatent = 512;
constexpr int kPad = 8;  // so that rows of latents start in different banks
constexpr int kColumnTiles = kMaxLatent / 16 / kWarps;

struct Flash {
  Matrix q, out;
  const int32_t *selected, *count;
  int64_t selected_stride, first_row;
  float scale;
  int heads, pieces;
  float *sums, *tops;  ///< [rows][pieces][heads][latent], [rows][pieces][heads][2]: largest score and total
};

struct Room {
  float scores[kHeads][kPiece + 4];
  __nv_bfloat16 weights[kHeads][kPiece + kPad];
  float top[kHeads], total[kHeads], shrink[kHeads];
  int32_t block[kPiece], token[kPiece];
};
static_assert(sizeof(Room) + kPiece * (kMaxLatent + kPad) * sizeof(__nv_bfloat16) <= 99 << 10,
              "GB10 has 99 KiB of shared memory a block");
size_t room_bytes(int64_t latent) {
  return sizeof(Room) + static_cast<size_t>(kPiece * (latent + kPad)) * sizeof(__nv_bfloat16);
}

/// Eight neighbouring latents of a token as bf16.
__device__ uint4 eight_latents(const LatentView& c, int64_t block, int64_t token, int64_t i) {
  const uint8_t* row = latent_row(c, block, token);
  if (c.format == static_cast<int>(KvFormat::bf16)) return *reinterpret_cast<const uint4*>(row + 2 * i);
  float v[8];
  if (eight_bit(c)) {
    const uint2 raw = *reinterpret_cast<const uint2*>(row + i);
    const float scale = latent_scales(c, block, token)[i / kGroup];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = decode(c, (j < 4 ? raw.x : raw.y) >> (8 * (j & 3)) & 255U) * scale;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = load(row, false, i + j);
  }
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
    words[j] = reinterpret_cast<const uint32_t&>(pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

/// The piece's tokens and their latents; zeros past its end.
__device__ void load_piece(const Rows& b, const LatentView& c, const Flash& a, int64_t row, int piece, int n,
                           Room& room, __nv_bfloat16* latents) {
  if (threadIdx.x < kPiece) {
    const int64_t visible = int64_t{b.position[row]} + 1, pools = a.count[row];
    const int64_t i = int64_t{piece} * kPiece + threadIdx.x, pool = i / c.kpool;
    const int64_t position = pool < pools ? int64_t{a.selected[row * a.selected_stride + pool]} * c.kpool + i % c.kpool
                                          : visible - visible % c.kpool + i - pools * c.kpool;
    const bool live = static_cast<int>(threadIdx.x) < n;
    room.block[threadIdx.x] = live ? static_cast<int32_t>(block_at(b, c, b.row_seq[row], position)) : 0;
    room.token[threadIdx.x] = live ? static_cast<int32_t>(position % kBlockTokens) : 0;
  }
  __syncthreads();
  const int per_row = c.latent / 8;
#pragma unroll 4
  for (int item = static_cast<int>(threadIdx.x); item < kPiece * per_row; item += 32 * kWarps) {
    const int token = item / per_row, i = item % per_row * 8;
    const uint4 v = token < n ? eight_latents(c, room.block[token], room.token[token], i) : uint4{};
    *reinterpret_cast<uint4*>(latents + token * (c.latent + kPad) + i) = v;
  }
  __syncthreads();
}

/// scores[head][token] of this warp's 8 tokens. Inputs are permuted alike in both operands: 16 bytes are 8 neighbours.
__device__ void score_piece(const LatentView& c, const Flash& a, int64_t row, int first_head, int n, Room& room,
                            const __nv_bfloat16* latents) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int g = lane >> 2, t = lane & 3;
  const auto* q = static_cast<const __nv_bfloat16*>(a.q.data) + row * a.q.stride + 8 * t;
  const __nv_bfloat16* key = latents + (8 * warp + g) * (c.latent + kPad) + 8 * t;
  float acc[2][4] = {};
#pragma unroll 4
  for (int k = 0; k < c.latent; k += 32) {
    const uint4 b = *reinterpret_cast<const uint4*>(key + k);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint4 rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = first_head + 16 * m + 8 * h + g;
        rows[h] = head < a.heads ? __ldg(reinterpret_cast<const uint4*>(q + int64_t{head} * c.latent + k)) : uint4{};
      }
      mma_bf16(acc[m], rows[0].x, rows[1].x, rows[0].y, rows[1].y, b.x, b.y);
      mma_bf16(acc[m], rows[0].z, rows[1].z, rows[0].w, rows[1].w, b.z, b.w);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 8 * warp + 2 * t + (i & 1);
      room.scores[16 * m + g + 8 * (i >> 1)][token] = token < n ? acc[m][i] * a.scale : -INFINITY;
    }
  }
}

/// Weights of the piece against the running maximum, and by how much older sums shrink.
__device__ void weigh_piece(Room& room) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  for (int head = warp; head < kHeads; head += kWarps) {
    const float x = room.scores[head][lane], y = room.scores[head][lane + 32];
    float top = fmaxf(x, y);
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, d));
    const float before = room.top[head], now = fmaxf(before, top);
    const float wx = expf(x - now), wy = expf(y - now), total = warp_sum(wx + wy);
    room.weights[head][lane] = __float2bfloat16_rn(wx);
    room.weights[head][lane + 32] = __float2bfloat16_rn(wy);
    __syncwarp();  // every lane has read what now changes
    if (lane == 0) {
      const float shrink = expf(before - now);  // 0 in the first piece
      room.top[head] = now;
      room.total[head] = room.total[head] * shrink + total;
      room.shrink[head] = shrink;
    }
  }
}

/// acc[tile][m][n] += weights · latents for this warp's column tiles.
__device__ void sum_piece(const LatentView& c, const Room& room, const __nv_bfloat16* latents,
                          float (&acc)[kColumnTiles][2][2][4]) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U), g = lane >> 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float low = room.shrink[16 * m + g], high = room.shrink[16 * m + g + 8];
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        acc[i][m][n][0] *= low;
        acc[i][m][n][1] *= low;
        acc[i][m][n][2] *= high;
        acc[i][m][n][3] *= high;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kPiece; k += 16) {
    uint32_t w[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      load_matrix4(w[m], shared_address(&room.weights[16 * m + (lane & 15)][k + (lane >> 4) * 8]));
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const int column = 16 * (warp + kWarps * i);
      if (column >= c.latent) break;
      uint32_t v[4];
      load_matrix4_transposed(
          v, shared_address(latents + (k + (lane & 15)) * (c.latent + kPad) + column + (lane >> 4) * 8));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_bf16(acc[i][m][0], w[m][0], w[m][1], w[m][2], w[m][3], v[0], v[1]);
        mma_bf16(acc[i][m][1], w[m][0], w[m][1], w[m][2], w[m][3], v[2], v[3]);
      }
    }
  }
}

/// Block (piece or nothing, row, 32 heads).
template <bool kWhole>
__global__ void __launch_bounds__(32 * kWarps) attend(Rows b, LatentView c, Flash a) {
  extern __shared__ __align__(16) unsigned char memory[];
  Room& room = *reinterpret_cast<Room*>(memory);
  auto* latents = reinterpret_cast<__nv_bfloat16*>(memory + sizeof(Room));
  const int64_t row = a.first_row + blockIdx.y;
  const int first_head = static_cast<int>(blockIdx.z) * kHeads;
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const bool padding = padding_row(b, row);
  const int64_t visible = padding ? 0 : int64_t{b.position[row]} + 1;
  const int64_t tokens = padding ? 0 : int64_t{a.count[row]} * c.kpool + visible % c.kpool;
  const int first = kWhole ? 0 : static_cast<int>(blockIdx.x);
  if (!kWhole && int64_t{first} * kPiece >= tokens) return;
  if (threadIdx.x < kHeads) {
    room.top[threadIdx.x] = -INFINITY;
    room.total[threadIdx.x] = 0;
  }
  float acc[kColumnTiles][2][2][4] = {};
  for (int piece = first; int64_t{piece} * kPiece < tokens; ++piece) {
    const int n = static_cast<int>(min(int64_t{kPiece}, tokens - int64_t{piece} * kPiece));
    __syncthreads();
    load_piece(b, c, a, row, piece, n, room, latents);
    score_piece(c, a, row, first_head, n, room, latents);
    __syncthreads();
    weigh_piece(room);
    __syncthreads();
    sum_piece(c, room, latents, acc);
    if (!kWhole) break;
  }
  const int g = lane >> 2, t = lane & 3;
  const int64_t place = (int64_t{blockIdx.y} * a.pieces + first) * a.heads;
#pragma unroll
  for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int head = 16 * m + g + 8 * ((e >> 1) & 1);
        const int column = 16 * (warp + kWarps * i) + 8 * (e >> 2) + 2 * t + (e & 1);
        if (first_head + head >= a.heads || column >= c.latent) continue;
        const float v = acc[i][m][e >> 2][e & 3];
        if constexpr (kWhole) {
          const float total = padding ? 1.0F : room.total[head];
          put(a.out, row, int64_t{first_head + head} * c.latent + column, padding ? 0.0F : v / total);
        } else {
          a.sums[(place + first_head + head) * c.latent + column] = v;
        }
      }
    }
  }
  if (!kWhole && threadIdx.x < kHeads && first_head + static_cast<int>(threadIdx.x) < a.heads) {
    float* tops = a.tops + (place + first_head + threadIdx.x) * 2;
    tops[0] = room.top[threadIdx.x];
    tops[1] = room.total[threadIdx.x];
  }
}

__host__ __device__ constexpr int room_of(int pieces) {
  return (pieces + 7) / 8 * 8;
}

/// Block (row, head): the pieces of a row together, in their order.
__global__ void join(Rows b, LatentView c, Flash a) {
  extern __shared__ float factors[];  // of the pieces
  __shared__ float total;
  const int64_t row = a.first_row + blockIdx.x, head = blockIdx.y;
  const bool padding = padding_row(b, row);
  const int64_t visible = padding ? 0 : int64_t{b.position[row]} + 1;
  const int64_t tokens = padding ? 0 : int64_t{a.count[row]} * c.kpool + visible % c.kpool;
  const auto pieces = static_cast<int>((tokens + kPiece - 1) / kPiece);
  const int64_t first = int64_t{blockIdx.x} * a.pieces * a.heads + head;
  if (threadIdx.x < 32) {
    const auto lane = static_cast<int>(threadIdx.x);
    float top = -INFINITY, sum = 0;
    for (int p = lane; p < pieces; p += 32) top = fmaxf(top, a.tops[(first + int64_t{p} * a.heads) * 2]);
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, d));
    for (int p = lane; p < pieces; p += 32) {
      const float* tops = a.tops + (first + int64_t{p} * a.heads) * 2;
      factors[p] = expf(tops[0] - top);
      sum += tops[1] * factors[p];
    }
    // The compiler reads factors in groups, past the last one too.
    for (int p = pieces + lane; p < room_of(pieces); p += 32) factors[p] = 0;
    sum = warp_sum(sum);
    if (lane == 0) total = sum;
  }
  __syncthreads();
  for (int64_t l = threadIdx.x; l < c.latent; l += blockDim.x) {
    float sum = 0;
#pragma unroll 8
    for (int p = 0; p < pieces; ++p) sum = fmaf(a.sums[(first + int64_t{p} * a.heads) * c.latent + l], factors[p], sum);
    put(a.out, row, head * c.latent + l, padding ? 0.0F : sum / total);
  }
}

}  // namespace

bool CudaOps::mla_flash(const MlaSparseArgs& args, const Rows& b, const LatentView& c, const Matrix& q,
                        const Matrix& out) {
  const bool aligned = reinterpret_cast<uintptr_t>(q.data) % 16 == 0 && q.stride % 8 == 0;
  if (!q.bf16 || !aligned || c.latent % 32 != 0 || c.latent > kMaxLatent) return false;
  Flash a{};
  a.q = q;
  a.out = out;
  a.selected = static_cast<const int32_t*>(args.selected.data);
  a.selected_stride = args.selected.stride[0];
  a.count = static_cast<const int32_t*>(args.n_selected.data);
  a.scale = args.scale;
  a.heads = args.heads;
  a.pieces = static_cast<int>((args.selected.dim(1) * c.kpool + c.kpool - 1 + kPiece - 1) / kPiece);
  const size_t shared = room_bytes(c.latent);
  const auto blocks = static_cast<unsigned>((args.heads + kHeads - 1) / kHeads);
  const auto all = static_cast<int64_t>(q.rows), window = std::min<int64_t>(b.window_rows, all);
  // Rows at a time, so that the room for pieces stays bounded; padding rows past the windows count as chunk rows.
  constexpr int64_t kRows = 32;
  const auto most = static_cast<size_t>(std::min(kRows, window) * a.pieces * a.heads);
  if (window > 0) {
    check(cudaFuncSetAttribute(attend<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "mla_sparse");
    a.sums = scratch<float>(Area::attention, most * static_cast<size_t>(c.latent + 2));
    a.tops = a.sums + most * static_cast<size_t>(c.latent);
  }
  for (; a.first_row < window; a.first_row += kRows) {
    const auto rows = static_cast<unsigned>(std::min(kRows, window - a.first_row));
    attend<false><<<dim3(static_cast<unsigned>(a.pieces), rows, blocks), 32 * kWarps, shared, stream()>>>(b, c, a);
    join<<<dim3(rows, static_cast<unsigned>(a.heads)), 256, static_cast<size_t>(room_of(a.pieces)) * sizeof(float),
           stream()>>>(b, c, a);
  }
  if (window < all) {
    check(cudaFuncSetAttribute(attend<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "mla_sparse");
    a.first_row = window;
    attend<true><<<dim3(1, static_cast<unsigned>(all - window), blocks), 32 * kWarps, shared, stream()>>>(b, c, a);
  }
  check(cudaGetLastError(), "mla_sparse");
  return true;
}

}  // namespace glm53::cuda
