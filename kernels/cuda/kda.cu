// Kimi delta attention (spec model §4, runtime §3). Both families run the recurrence row by row: value columns do not
// meet, so a block has 32 of them for one head of one sequence and keeps that part of the state in shared memory.
#include <algorithm>

#include "common/error.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/kda.cuh"

namespace glm53::cuda {
namespace {

constexpr int kKeyGroups = 8;  // threads that share a column
constexpr int kMaxDim = 256;
/// One block's part of a head's state and what a row needs.
struct Tile {
  float s[kMaxDim * kColumns], k[kMaxDim], q[kMaxDim], decay[kMaxDim], part[kKeyGroups][kColumns], delta[kColumns],
      room[32];
};

/// One row of the recurrence (decay, delta, read); returns the output of this thread's column to key group 0.
__device__ float step(const KdaView& c, int64_t head, const RawRow& row, Tile& t, int first, bool read) {
  const int dim = c.dim, column = static_cast<int>(threadIdx.x) % kColumns,
            group = static_cast<int>(threadIdx.x) / kColumns;
  const int a = static_cast<int>(threadIdx.x);
  const float k = a < dim ? load(row.k, row.bf16, row.k_at + a) : 0.0F;
  const float q = a < dim && read ? load(row.q, row.bf16, row.q_at + a) : 0.0F;
  const float k_norm = 1.0F / sqrtf(block_sum(k * k, t.room) + 1e-6F);
  const float q_norm = read ? rsqrtf(static_cast<float>(dim)) / sqrtf(block_sum(q * q, t.room) + 1e-6F) : 0.0F;
  if (a < dim) {
    t.k[a] = k * k_norm;
    t.q[a] = q * q_norm;
    const float rate = expf(at(c.a_log, head)), raw = load(row.gate, row.bf16, row.gate_at + a);
    t.decay[a] = expf(c.lower * sigmoid(rate * (raw + at(c.dt_bias, head * dim + a))));
  }
  __syncthreads();
  const int each = (dim + kKeyGroups - 1) / kKeyGroups, begin = group * each, end = min(dim, begin + each);
  float predicted = 0;
  for (int i = begin; i < end; ++i) {
    const float s = t.s[i * kColumns + column] * t.decay[i];
    t.s[i * kColumns + column] = s;
    predicted = fmaf(t.k[i], s, predicted);
  }
  t.part[group][column] = predicted;
  __syncthreads();
  if (group == 0) {
    float total = 0;
    for (int g = 0; g < kKeyGroups; ++g) total += t.part[g][column];
    const float v = first + column < dim ? load(row.v, row.bf16, row.v_at + first + column) : 0.0F;
    t.delta[column] = sigmoid(row.beta) * (v - total);
  }
  __syncthreads();
  float out = 0;
  for (int i = begin; i < end; ++i) {
    const float s = fmaf(t.k[i], t.delta[column], t.s[i * kColumns + column]);
    t.s[i * kColumns + column] = s;
    out = fmaf(t.q[i], s, out);
  }
  t.part[group][column] = out;
  __syncthreads();
  float total = 0;
  if (group == 0) {
    for (int g = 0; g < kKeyGroups; ++g) total += t.part[g][column];
  }
  return total;
}

__device__ void load_state(const KdaView& c, const float* from, Tile& t, int first) {
  for (int i = static_cast<int>(threadIdx.x); i < c.dim * kColumns; i += static_cast<int>(blockDim.x)) {
    const int a = i / kColumns, b = first + i % kColumns;
    t.s[i] = b < c.dim ? from[a * c.dim + b] : 0.0F;
  }
  __syncthreads();
}
__device__ void save_state(const KdaView& c, const Tile& t, float* to, int first) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < c.dim * kColumns; i += static_cast<int>(blockDim.x)) {
    const int a = i / kColumns, b = first + i % kColumns;
    if (b < c.dim) to[a * c.dim + b] = t.s[i];
  }
  __syncthreads();
}

/// Commits `count` records of a slot to the tile and to the state.
__device__ void replay_records(const KdaView& c, int64_t slot, int64_t head, int count, Tile& t, int first) {
  if (count == 0) return;
  for (int i = 0; i < count; ++i) {
    step(c, head, record_row(c, slot, head, i), t, first, false);
  }
  save_state(c, t, state_of(c, c.state, slot, head), first);
}

__device__ void run_row(const KdaView& c, const KdaRows& in, int64_t r, int64_t head, Tile& t, int first) {
  const float out = step(c, head, raw_row(in, r, head * c.dim, head), t, first, true);
  const int column = first + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kColumns && column < c.dim) put(in.out, r, head * c.dim + column, out);
}

__device__ void export_states(const KdaView& c, const Rows& b, int64_t seq, int64_t tokens, int64_t head, Tile& t,
                              int first) {
  if (b.export_pos == nullptr || c.snap_state == nullptr) return;
  for (int e = 0; e < 2; ++e) {
    const int64_t snap = b.export_snap[2 * seq + e];
    if (b.export_pos[2 * seq + e] != tokens || snap < 0 || snap >= c.snaps) continue;
    save_state(c, t, state_of(c, c.snap_state, snap, head), first);
  }
}

/// Window sequences leave their rows in the records (keep_records, a launch of its own since all column blocks read the
/// old ones); chunk sequences leave them in the state.
__global__ void run_rows(KdaView c, Rows b, KdaRows in, int32_t first_seq, bool window) {
  extern __shared__ char memory[];
  Tile& t = *reinterpret_cast<Tile*>(memory);
  const int64_t seq = first_seq + int64_t{blockIdx.x}, head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.z) * kColumns;
  const int64_t slot = b.slot[seq];
  if (slot < 0) return;
  load_state(c, state_of(c, c.state, slot, head), t, first);
  if (window) replay_records(c, slot, head, b.replay[seq], t, first);
  const int64_t begin = b.row_begin[seq], end = b.row_begin[seq + 1];
  const int64_t position = begin < end ? b.position[begin] : 0;
  if (!window) export_states(c, b, seq, position, head, t, first);
  for (int64_t r = begin; r < end; ++r) {
    run_row(c, in, r, head, t, first);
    if (!window) export_states(c, b, seq, position + r - begin + 1, head, t, first);
  }
  if (!window && begin < end) save_state(c, t, state_of(c, c.state, slot, head), first);
}

__global__ void keep_records(KdaView c, Rows b, KdaRows in) {
  const int64_t r = blockIdx.x, head = blockIdx.y;
  const int64_t seq = b.row_seq[r], slot = b.slot[seq];
  if (slot < 0) return;
  float* record = record_of(c, slot, r - b.row_begin[seq]);
  float* to = record + head * 3 * c.dim;
  for (int64_t i = threadIdx.x; i < c.dim; i += blockDim.x) {
    to[i] = at(in.k, r, head * c.dim + i);
    to[c.dim + i] = at(in.v, r, head * c.dim + i);
    to[2 * c.dim + i] = at(in.gate, r, head * c.dim + i);
  }
  if (threadIdx.x == 0) record[c.heads * 3 * c.dim + head] = at(in.beta, r, head);
}

/// Zeroes padding rows of [first, last).
__global__ void zero_padding(Rows b, Matrix out, int64_t first) {
  const int64_t r = first + blockIdx.x;
  if (!padding_row(b, r)) return;
  for (int64_t i = threadIdx.x; i < out.columns; i += blockDim.x) put(out, r, i, 0.0F);
}

__global__ void flush_records(KdaView c, Pairs pairs) {
  extern __shared__ char memory[];
  Tile& t = *reinterpret_cast<Tile*>(memory);
  const int64_t slot = pairs.slot[blockIdx.x], head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.z) * kColumns;
  if (slot < 0 || pairs.replay[blockIdx.x] == 0) return;
  load_state(c, state_of(c, c.state, slot, head), t, first);
  replay_records(c, slot, head, pairs.replay[blockIdx.x], t, first);
}

struct ConvView {
  void *conv, *snap;
  bool bf16;
  int64_t layers, layer, columns, channels, history, snaps;
  Plain weight;
};

/// Window sequences: a thread has one channel of one; `past` holds the raw columns before the current row.
__global__ void convolve(ConvView c, Rows b, Matrix raw, Matrix out) {
  const int64_t seq = blockIdx.x, channel = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (channel >= c.channels) return;
  const int64_t slot = b.slot[seq], begin = b.row_begin[seq], end = b.row_begin[seq + 1];
  if (slot < 0) return;
  const int64_t base = (slot * c.layers + c.layer) * c.columns * c.channels + channel, drop = b.replay[seq];
  float past[kMaxKernel], weight[kMaxKernel];
  for (int j = 0; j < c.history; ++j) past[j] = load(c.conv, c.bf16, base + (j + drop) * c.channels);
  for (int j = 0; j <= c.history; ++j) weight[j] = at(c.weight, channel * (c.history + 1) + j);
  for (int j = 0; j < c.history; ++j) store(c.conv, c.bf16, base + j * c.channels, past[j]);
  for (int64_t r = begin; r < end; ++r) {
    const float now = at(raw, r, channel);
    float v = 0;
    for (int j = 0; j < c.history; ++j) v += weight[j] * past[j];
    v += weight[c.history] * now;
    put(out, r, channel, v * sigmoid(v));
    for (int j = 0; j + 1 < c.history; ++j) past[j] = past[j + 1];
    past[c.history - 1] = now;
    store(c.conv, c.bf16, base + (c.history + r - begin) * c.channels, now);
  }
}

constexpr int kConvRows = 32;  // rows of a block of convolve_chunk

/// Column `back` before row r of a sequence that begins at row `begin`: a raw row, or the history.
__device__ float column_before(const ConvView& c, const Matrix& raw, int64_t begin, int64_t r, int64_t back,
                               int64_t base, int64_t channel) {
  const int64_t from = r - back;
  if (from >= begin) return at(raw, from, channel);
  const int64_t column = c.history + from - begin;
  return column < 0 ? 0.0F : load(c.conv, c.bf16, base + column * c.channels);
}

/// Chunk sequences: outputs only, many rows at once; keep_chunk follows. A thread has one channel of 32 rows.
__global__ void convolve_chunk(ConvView c, Rows b, Matrix raw, Matrix out) {
  const int64_t channel = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t first = b.window_rows + int64_t{blockIdx.x} * kConvRows;
  if (channel >= c.channels) return;
  float weight[kMaxKernel], past[kMaxKernel];
  for (int j = 0; j <= c.history; ++j) weight[j] = at(c.weight, channel * (c.history + 1) + j);
  int64_t current = -1;
  for (int64_t r = first; r < min(first + kConvRows, int64_t{b.rows}); ++r) {
    const int64_t seq = b.row_seq[r], slot = b.slot[seq];
    if (slot < 0) continue;
    if (seq != current) {
      current = seq;
      const int64_t base = (slot * c.layers + c.layer) * c.columns * c.channels + channel;
      for (int64_t j = 0; j < c.history; ++j) {
        past[j] = column_before(c, raw, b.row_begin[seq], r, c.history - j, base, channel);
      }
    }
    const float now = at(raw, r, channel);
    float v = 0;
    for (int j = 0; j < c.history; ++j) v += weight[j] * past[j];
    v += weight[c.history] * now;
    put(out, r, channel, v * sigmoid(v));
    for (int j = 0; j + 1 < c.history; ++j) past[j] = past[j + 1];
    past[c.history - 1] = now;
  }
}

/// Chunk sequences: exports, then the history that the rows leave.
__global__ void keep_chunk(ConvView c, Rows b, Matrix raw) {
  const int64_t seq = b.window_seqs + int64_t{blockIdx.x}, channel = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t slot = b.slot[seq], begin = b.row_begin[seq], end = b.row_begin[seq + 1];
  if (channel >= c.channels || slot < 0) return;
  const int64_t base = (slot * c.layers + c.layer) * c.columns * c.channels + channel;
  const auto keep = [&](void* pool, int64_t from, int64_t row) {
    float past[kMaxKernel];  // all read before any is written: source and target overlap
    for (int64_t j = 0; j < c.history; ++j) past[j] = column_before(c, raw, begin, row, c.history - j, base, channel);
    for (int64_t j = 0; j < c.history; ++j) store(pool, c.bf16, from + j * c.channels, past[j]);
  };
  const int64_t position = begin < end ? b.position[begin] : 0;
  for (int e = 0; e < 2 && b.export_pos != nullptr && c.snap != nullptr; ++e) {
    const int64_t snap = b.export_snap[2 * seq + e], tokens = b.export_pos[2 * seq + e] - position;
    if (tokens < 0 || tokens > end - begin || snap < 0 || snap >= c.snaps) continue;
    keep(c.snap, (snap * c.layers + c.layer) * c.history * c.channels + channel, begin + tokens);
  }
  keep(c.conv, base, end);
}

__global__ void shift_history(ConvView c, Pairs pairs) {
  const int64_t slot = pairs.slot[blockIdx.x], channel = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t drop = pairs.replay[blockIdx.x];
  if (slot < 0 || drop == 0 || channel >= c.channels) return;
  const int64_t base = (slot * c.layers + c.layer) * c.columns * c.channels + channel;
  for (int64_t j = 0; j < c.history; ++j) {  // ascending: a column is read before it is overwritten
    store(c.conv, c.bf16, base + j * c.channels, load(c.conv, c.bf16, base + (j + drop) * c.channels));
  }
}

int64_t items_of(const Tensor& t) {
  return t.empty() ? 0 : t.dim(0);
}

KdaView kda_view(std::string_view op, const Caches& caches, int layer, const Weight& a_log, const Weight& dt_bias,
                 float lower) {
  const CacheGeometry& g = caches.geometry;
  expect_that(layer >= 0 && layer < g.kda_layers, op, "layer is not one of the geometry's kda_layers");
  expect_that(g.kda_heads > 0 && g.head_dim > 0 && g.head_dim <= kMaxDim, op, "head_dim must be 1 … 256");
  const auto fits = [&](const Tensor& t, int64_t item) {
    return t.dtype == Dtype::f32 && t.contiguous() && t.place != Place::host && t.elements() == t.dim(0) * item;
  };
  const int64_t item = int64_t{g.kda_layers} * g.kda_heads * g.head_dim * g.head_dim;
  expect_that(!caches.state.empty() && fits(caches.state, item), op, "caches.state has another shape");
  expect_that(caches.snap_state.empty() || fits(caches.snap_state, item), op, "caches.snap_state has another shape");
  expect_that(!caches.records.empty() && fits(caches.records, int64_t{g.kda_layers} * g.max_window * g.record_width()),
              op, "caches.records has another shape");
  KdaView v{};
  v.state = static_cast<float*>(caches.state.data);
  v.records = static_cast<float*>(caches.records.data);
  v.snap_state = static_cast<float*>(caches.snap_state.data);
  v.layers = g.kda_layers;
  v.layer = layer;
  v.heads = g.kda_heads;
  v.max_window = g.max_window;
  v.record_width = g.record_width();
  v.snaps = items_of(caches.snap_state);
  v.dim = g.head_dim;
  v.a_log = plain(op, "a_log", a_log, v.heads, 1);
  v.dt_bias = plain(op, "dt_bias", dt_bias, v.heads * v.dim, 1);
  v.lower = lower;
  return v;
}

ConvView conv_view(std::string_view op, const Caches& caches, int layer) {
  const CacheGeometry& g = caches.geometry;
  expect_that(layer >= 0 && layer < g.kda_layers, op, "layer is not one of the geometry's kda_layers");
  expect_that(g.conv_kernel >= 2 && g.conv_kernel <= kMaxKernel, op, "conv_kernel must be 2 … 8");
  const auto fits = [&](const Tensor& t, int64_t columns) {
    return t.contiguous() && t.place != Place::host && (t.dtype == Dtype::f32 || t.dtype == Dtype::bf16) &&
           t.elements() == t.dim(0) * g.kda_layers * columns * g.conv_channels;
  };
  expect_that(!caches.conv.empty() && fits(caches.conv, g.conv_columns()), op, "caches.conv has another shape");
  expect_that(caches.snap_conv.empty() ||
                  (fits(caches.snap_conv, g.conv_kernel - 1) && caches.snap_conv.dtype == caches.conv.dtype),
              op, "caches.snap_conv has another shape");
  return {caches.conv.data,
          caches.snap_conv.data,
          caches.conv.dtype == Dtype::bf16,
          g.kda_layers,
          layer,
          g.conv_columns(),
          g.conv_channels,
          g.conv_kernel - 1,
          items_of(caches.snap_conv),
          {}};
}

unsigned u(int64_t n) {
  return static_cast<unsigned>(n);
}

}  // namespace

void CudaOps::kda_conv(const KdaConvArgs& args) {
  const std::string_view op = "kda_conv";
  ConvView c = conv_view(op, *args.caches, args.layer);
  c.weight = plain(op, "weight", *args.weight, c.channels, c.history + 1);
  const Matrix raw = matrix(op, "raw", args.raw, {-1, c.channels});
  const Matrix out = matrix(op, "out", args.out, {raw.rows, c.channels});
  const Rows b = rows(op, *args.batch, raw.rows);
  if (raw.rows == 0) return;
  const unsigned blocks = u((c.channels + 127) / 128);
  if (b.window_seqs > 0) convolve<<<dim3(u(b.window_seqs), blocks), 128, 0, stream()>>>(c, b, raw, out);
  if (b.rows > b.window_rows) {
    const int64_t pieces = (b.rows - b.window_rows + kConvRows - 1) / kConvRows;
    convolve_chunk<<<dim3(u(pieces), blocks), 128, 0, stream()>>>(c, b, raw, out);
  }
  if (b.seqs > b.window_seqs) keep_chunk<<<dim3(u(b.seqs - b.window_seqs), blocks), 128, 0, stream()>>>(c, b, raw);
  zero_padding<<<u(raw.rows), 128, 0, stream()>>>(b, out, 0);
  check(cudaGetLastError(), op);
}

void CudaOps::kda_rows(const KdaArgs& args, bool window, std::string_view op) {
  const KdaView c = kda_view(op, *args.caches, args.layer, *args.a_log, *args.dt_bias, args.lower_bound);
  const int64_t width = c.heads * c.dim;
  KdaRows in{};
  in.q = matrix(op, "q", args.q, {-1, width});
  const int64_t all = in.q.rows;
  in.k = matrix(op, "k", args.k, {all, width});
  in.v = matrix(op, "v", args.v, {all, width});
  in.gate = matrix(op, "gate", args.gate, {all, width});
  in.beta = matrix(op, "beta", args.beta, {all, c.heads});
  in.out = matrix(op, "out", args.out, {all, width});
  expect_that(in.q.bf16 == in.k.bf16 && in.k.bf16 == in.v.bf16 && in.v.bf16 == in.gate.bf16, op,
              "q, k, v and gate differ in dtype");
  const Rows b = rows(op, *args.batch, all);
  const int32_t first = window ? 0 : b.window_seqs, count = window ? b.window_seqs : b.seqs - b.window_seqs;
  const cudaStream_t on = stream();
  check(cudaFuncSetAttribute(run_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Tile)), op);
  bool done = count == 0;
  if (!done && !window && in.q.bf16) {
    done = run_chunks(c, b, in, first, count, scratch<std::byte>(Area::attention, chunk_room(c)), on);
  }
  if (!done && !run_lanes(c, b, in, first, count, window, on)) {
    run_rows<<<dim3(u(count), u(c.heads), u((c.dim + kColumns - 1) / kColumns)), kColumns * kKeyGroups, sizeof(Tile),
               on>>>(c, b, in, first, window);
  }
  if (window && b.window_rows > 0) keep_records<<<dim3(u(b.window_rows), u(c.heads)), 64, 0, on>>>(c, b, in);
  const int64_t from = window ? 0 : b.window_rows;
  // Rows past the real count belong to the chunk call, or to the window call when there is no other.
  const int64_t to = window ? b.window_rows : all;
  if (to > from) zero_padding<<<u(to - from), 128, 0, on>>>(b, in.out, from);
  if (window && all > b.rows) zero_padding<<<u(all - b.rows), 128, 0, on>>>(b, in.out, b.rows);
  check(cudaGetLastError(), op);
}

void CudaOps::kda_window(const KdaArgs& args) {
  kda_rows(args, true, "kda_window");
}
void CudaOps::kda_chunk(const KdaArgs& args) {
  expect_that(args.lower_bound <= 0, "kda_chunk", "lower_bound is not a decay");
  kda_rows(args, false, "kda_chunk");
}

void CudaOps::kda_flush(const FlushArgs& args) {
  const std::string_view op = "kda_flush";
  const CacheGeometry& g = args.caches->geometry;
  expect_that(args.replay.size() == args.slots.size(), op, "slots and replay have different lengths");
  expect_that(args.a_log.size() == static_cast<size_t>(g.kda_layers) && args.dt_bias.size() == args.a_log.size(), op,
              "a_log and dt_bias need one weight per KDA layer");
  const cudaStream_t on = stream();
  check(cudaFuncSetAttribute(flush_records, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Tile)), op);
  for (size_t done = 0; done < args.slots.size(); done += kFlushPairs) {
    const size_t count = std::min(args.slots.size() - done, size_t{kFlushPairs});
    Pairs pairs{};
    for (size_t i = 0; i < count; ++i) {
      pairs.slot[i] = static_cast<int32_t>(args.slots[done + i]);
      pairs.replay[i] = args.replay[done + i];
      expect_that(pairs.slot[i] >= -1 && pairs.slot[i] < items_of(args.caches->state), op,
                  "a slot is outside the pool");
      expect_that(pairs.replay[i] >= 0 && pairs.replay[i] <= g.max_window, op, "a replay is longer than max_window");
    }
    for (int layer = 0; layer < g.kda_layers; ++layer) {
      const auto at = static_cast<size_t>(layer);
      const KdaView c = kda_view(op, *args.caches, layer, *args.a_log[at], *args.dt_bias[at], args.lower_bound);
      const ConvView conv = conv_view(op, *args.caches, layer);
      if (!flush_lanes(c, pairs, static_cast<int64_t>(count), on)) {
        flush_records<<<dim3(u(static_cast<int64_t>(count)), u(c.heads), u((c.dim + kColumns - 1) / kColumns)),
                        kColumns * kKeyGroups, sizeof(Tile), on>>>(c, pairs);
      }
      shift_history<<<dim3(u(static_cast<int64_t>(count)), u((conv.channels + 127) / 128)), 128, 0, on>>>(conv, pairs);
    }
  }
  check(cudaGetLastError(), op);
}

}  // namespace glm53::cuda
