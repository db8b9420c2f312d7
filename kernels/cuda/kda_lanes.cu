// The recurrence of Kimi delta attention (spec model §4, runtime §3) with the state in registers: eight lanes share a
// value column, each has every eighth group of four keys, and meet in three shuffles; a warp has four columns and needs
// no other warp. Rows are prepared (norms, decays) sixteen at a time into shared memory.
#include "kernels/cuda/kda.cuh"
#include "kernels/cuda/runtime.h"

namespace glm53::cuda {
namespace {

constexpr int kWarps = 8, kTileRows = 16;

template <int kDim>
struct Prepared {
  float k[kTileRows][kDim], q[kTileRows][kDim], decay[kTileRows][kDim];
  float v[kTileRows][kColumns], beta[kTileRows];
};

/// Key of a lane's element j.
__device__ int key_of(int j) {
  return 32 * (j / 4) + 4 * static_cast<int>(threadIdx.x & 7U) + j % 4;
}
/// Value column of a lane, within the block's.
__device__ int column_of() {
  return static_cast<int>(threadIdx.x >> 5) * 4 + static_cast<int>(threadIdx.x >> 3 & 3U);
}
/// Sum over the eight lanes of a column.
__device__ float key_sum(float v) {
  v += __shfl_xor_sync(0xffffffffU, v, 1);
  v += __shfl_xor_sync(0xffffffffU, v, 2);
  return v + __shfl_xor_sync(0xffffffffU, v, 4);
}

template <int kDim>
struct Column {
  static constexpr int kKeys = kDim / 8;
  float s[kKeys];

  __device__ void load_from(const float* state, int first) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) s[j] = state[key_of(j) * kDim + first + column_of()];
  }
  __device__ void save_to(float* state, int first) const {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) state[key_of(j) * kDim + first + column_of()] = s[j];
  }
  /// Decay, delta, read: one row. The result is the same in the eight lanes.
  __device__ float step(const Prepared<kDim>& rows, int r) {
    float k[kKeys], predicted = 0;
#pragma unroll
    for (int j = 0; j < kKeys; j += 4) {
      const float4 keys = *reinterpret_cast<const float4*>(&rows.k[r][key_of(j)]);
      const float4 decays = *reinterpret_cast<const float4*>(&rows.decay[r][key_of(j)]);
      k[j] = keys.x;
      k[j + 1] = keys.y;
      k[j + 2] = keys.z;
      k[j + 3] = keys.w;
      s[j] *= decays.x;
      s[j + 1] *= decays.y;
      s[j + 2] *= decays.z;
      s[j + 3] *= decays.w;
#pragma unroll
      for (int i = j; i < j + 4; ++i) predicted = fmaf(k[i], s[i], predicted);
    }
    const float delta = rows.beta[r] * (rows.v[r][column_of()] - key_sum(predicted));
    float out = 0;
#pragma unroll
    for (int j = 0; j < kKeys; j += 4) {
      const float4 q = *reinterpret_cast<const float4*>(&rows.q[r][key_of(j)]);
#pragma unroll
      for (int i = j; i < j + 4; ++i) s[i] = fmaf(k[i], delta, s[i]);
      out = fmaf(q.x, s[j], out);
      out = fmaf(q.y, s[j + 1], out);
      out = fmaf(q.z, s[j + 2], out);
      out = fmaf(q.w, s[j + 3], out);
    }
    return key_sum(out);
  }
};

/// A warp prepares row r of the tile.
template <int kDim>
__device__ void prepare_row(const KdaView& c, int64_t head, const RawRow& row, int first, Prepared<kDim>& rows, int r) {
  constexpr int kEach = kDim / 32;
  const int lane = static_cast<int>(threadIdx.x & 31U);
  float k[kEach], q[kEach], k_squares = 0, q_squares = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int a = 32 * i + lane;
    k[i] = load(row.k, row.bf16, row.k_at + a);
    q[i] = row.q == nullptr ? 0.0F : load(row.q, row.bf16, row.q_at + a);
    k_squares = fmaf(k[i], k[i], k_squares);
    q_squares = fmaf(q[i], q[i], q_squares);
  }
  const float k_norm = 1.0F / sqrtf(warp_sum(k_squares) + 1e-6F);
  const float q_norm = rsqrtf(static_cast<float>(kDim)) / sqrtf(warp_sum(q_squares) + 1e-6F);
  const float rate = expf(at(c.a_log, head));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int a = 32 * i + lane;
    const float raw = load(row.gate, row.bf16, row.gate_at + a);
    rows.k[r][a] = k[i] * k_norm;
    rows.q[r][a] = q[i] * q_norm;
    rows.decay[r][a] = expf(c.lower * sigmoid(rate * (raw + at(c.dt_bias, head * kDim + a))));
  }
  rows.v[r][lane] = load(row.v, row.bf16, row.v_at + first + lane);
  if (lane == 0) rows.beta[r] = sigmoid(row.beta);
}

/// Runs `count` rows: raw(i) gives a row, done(i, out) takes the output of this lane's column.
template <int kDim, class Raw, class Done>
__device__ void run_tile_rows(const KdaView& c, int64_t head, int first, int64_t count, Prepared<kDim>& rows,
                              Column<kDim>& column, const Raw& raw, const Done& done) {
  const int warp = static_cast<int>(threadIdx.x >> 5);
  for (int64_t begin = 0; begin < count; begin += kTileRows) {
    const int n = static_cast<int>(min(int64_t{kTileRows}, count - begin));
    __syncthreads();
    for (int r = warp; r < n; r += kWarps) prepare_row<kDim>(c, head, raw(begin + r), first, rows, r);
    __syncthreads();
    for (int r = 0; r < n; ++r) done(begin + r, column.step(rows, r));
  }
}

template <int kDim>
__device__ void commit_records(const KdaView& c, int64_t slot, int64_t head, int first, int count, Prepared<kDim>& rows,
                               Column<kDim>& column) {
  if (count == 0) return;
  run_tile_rows<kDim>(
      c, head, first, count, rows, column, [&](int64_t i) { return record_row(c, slot, head, static_cast<int>(i)); },
      [](int64_t, float) {});
  column.save_to(state_of(c, c.state, slot, head), first);
}

/// Block (sequence, head, 32 value columns).
template <int kDim>
__global__ void __launch_bounds__(32 * kWarps) run(KdaView c, Rows b, KdaRows in, int32_t first_seq, bool window) {
  __shared__ __align__(16) Prepared<kDim> rows;
  const int64_t seq = first_seq + int64_t{blockIdx.x}, head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.z) * kColumns;
  const int64_t slot = b.slot[seq];
  if (slot < 0) return;
  float* state = state_of(c, c.state, slot, head);
  Column<kDim> column;
  column.load_from(state, first);
  if (window) commit_records<kDim>(c, slot, head, first, b.replay[seq], rows, column);
  const int64_t begin = b.row_begin[seq], end = b.row_begin[seq + 1];
  const int64_t position = begin < end ? b.position[begin] : 0;
  int64_t wanted[2] = {-1, -1};  // rows after which the state is exported
  if (!window && b.export_pos != nullptr && c.snap_state != nullptr) {
    for (int e = 0; e < 2; ++e) {
      const int64_t snap = b.export_snap[2 * seq + e];
      if (b.export_pos[2 * seq + e] >= 0 && snap >= 0 && snap < c.snaps) {
        wanted[e] = b.export_pos[2 * seq + e] - position;
      }
    }
  }
  const auto export_state = [&](int64_t tokens) {
    for (int e = 0; e < 2; ++e) {
      if (wanted[e] == tokens) column.save_to(state_of(c, c.snap_state, b.export_snap[2 * seq + e], head), first);
    }
  };
  export_state(0);
  run_tile_rows<kDim>(
      c, head, first, end - begin, rows, column, [&](int64_t i) { return raw_row(in, begin + i, head * kDim, head); },
      [&](int64_t i, float out) {
        if ((threadIdx.x & 7U) == 0) put(in.out, begin + i, head * kDim + first + column_of(), out);
        export_state(i + 1);
      });
  if (!window && begin < end) column.save_to(state, first);
}

template <int kDim>
__global__ void __launch_bounds__(32 * kWarps) flush(KdaView c, Pairs pairs) {
  __shared__ __align__(16) Prepared<kDim> rows;
  const int64_t slot = pairs.slot[blockIdx.x], head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.z) * kColumns, count = pairs.replay[blockIdx.x];
  if (slot < 0 || count == 0) return;
  Column<kDim> column;
  column.load_from(state_of(c, c.state, slot, head), first);
  commit_records<kDim>(c, slot, head, first, count, rows, column);
}

dim3 blocks_of(int64_t items, const KdaView& c) {
  return {static_cast<unsigned>(items), static_cast<unsigned>(c.heads), static_cast<unsigned>(c.dim / kColumns)};
}

}  // namespace

bool run_lanes(const KdaView& c, const Rows& b, const KdaRows& in, int32_t first_seq, int32_t seqs, bool window,
               cudaStream_t on) {
  if (c.dim != 64 && c.dim != 128) return false;
  if (c.dim == 64) {
    run<64><<<blocks_of(seqs, c), 32 * kWarps, 0, on>>>(c, b, in, first_seq, window);
  } else {
    run<128><<<blocks_of(seqs, c), 32 * kWarps, 0, on>>>(c, b, in, first_seq, window);
  }
  check(cudaGetLastError(), "kda");
  return true;
}

bool flush_lanes(const KdaView& c, const Pairs& pairs, int64_t count, cudaStream_t on) {
  if (c.dim != 64 && c.dim != 128) return false;
  if (c.dim == 64) {
    flush<64><<<blocks_of(count, c), 32 * kWarps, 0, on>>>(c, pairs);
  } else {
    flush<128><<<blocks_of(count, c), 32 * kWarps, 0, on>>>(c, pairs);
  }
  check(cudaGetLastError(), "kda");
  return true;
}

}  // namespace glm53::cuda
