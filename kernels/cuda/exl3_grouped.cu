// The mixture of experts for many rows (prefill): the pairs (row, expert) are sorted by expert and each expert's rows
// go through it 64 at a time; a tile of 4-bit MCG codes is decoded once for all of them (spec exl3 §6.7).
//
//   sort        pairs -> positions, segments of up to 64 positions of one expert
//   prepare     rotated inputs of gate and up, fp16
//   multiply    gate and up: a block has 64 positions and 256 outputs, its warps 32 outputs each
//   activate    SwiGLU -> rotated inputs of down
//   multiply    down
//   combine     Σ weight · expert, in ascending expert id
//
// A row of the A operand never meets another one: its bits do not depend on what else is in the batch.
#include <algorithm>

#include "common/error.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/trellis.cuh"

namespace glm53::cuda {
namespace {

constexpr int kSegment = 64;  // rows of a block
constexpr int kWarps = 8;     // of a multiplying block
constexpr int kBlockOut = 32 * kWarps;
constexpr int kStep = 32;  // inputs of a stage
constexpr int kParts = kStep / 16;
constexpr int kStages = 4;
constexpr int kStageHalves = kSegment * kStep;
constexpr int kSortThreads = 1024, kMaxExperts = 1024;
constexpr int kRowThreads = 256;  // of a block that has one row
constexpr int kMaxWidth = 8192;
constexpr int kPerWarp = kMaxWidth / 128 / (kRowThreads / 32);

struct Segment {
  int32_t expert, first, count;
};

struct Grouped {
  const int32_t* index;
  int64_t index_stride;
  int32_t k, pairs, experts;
  int64_t hidden, inter;
  const Linear *gate, *up, *down;
  Matrix x;
  float limit;
  int32_t *order, *place, *segment_count;  ///< position -> pair and back
  Segment* segments;
  __half *x_gate, *x_up, *x_down;  ///< [position][width]
  float* unscale;                  ///< [3][position]: gate, up, down
  int32_t up_scale;                ///< which of them is up's: 0 where up shares the inputs of gate
  float *gates, *ups, *outputs;    ///< [position][width]
};

__device__ int32_t expert_of(const Grouped& job, int pair) {
  return job.index[pair / job.k * job.index_stride + pair % job.k];
}

/// One block. The order inside an expert is whatever the atomics give: nothing depends on it.
__global__ void __launch_bounds__(kSortThreads) sort_pairs(Grouped job) {
  __shared__ int32_t counts[kMaxExperts], starts[kMaxExperts];
  for (int e = static_cast<int>(threadIdx.x); e < job.experts; e += kSortThreads) counts[e] = 0;
  __syncthreads();
  for (int p = static_cast<int>(threadIdx.x); p < job.pairs; p += kSortThreads) {
    const int32_t e = expert_of(job, p);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // sums of pairs and of segments before each expert, 32 experts at a time
    const int lane = static_cast<int>(threadIdx.x);
    int32_t pairs = 0, segments = 0;
    for (int base = 0; base < job.experts; base += 32) {
      const int e = base + lane;
      const int32_t mine = e < job.experts ? counts[e] : 0, parts = (mine + kSegment - 1) / kSegment;
      int32_t a = mine, b = parts;
      for (int d = 1; d < 32; d *= 2) {
        const int32_t x = __shfl_up_sync(0xffffffffU, a, d), y = __shfl_up_sync(0xffffffffU, b, d);
        if (lane >= d) {
          a += x;
          b += y;
        }
      }
      const int32_t first = pairs + a - mine, segment = segments + b - parts;
      for (int32_t s = 0; s < parts; ++s) {
        job.segments[segment + s] = {e, first + s * kSegment, min(kSegment, mine - s * kSegment)};
      }
      if (e < job.experts) starts[e] = first;
      pairs += __shfl_sync(0xffffffffU, a, 31);
      segments += __shfl_sync(0xffffffffU, b, 31);
    }
    if (lane == 0) *job.segment_count = segments;
  }
  __syncthreads();
  for (int p = static_cast<int>(threadIdx.x); p < job.pairs; p += kSortThreads) {
    const int32_t e = expert_of(job, p);
    const int32_t position = e >= 0 ? atomicAdd(&starts[e], 1) : -1;
    job.place[p] = position;
    if (e >= 0) job.order[position] = p;
  }
}

/// Scales the block's rotated row to fp16; the factor back goes to `unscale`.
__device__ void store_row(const float (&v)[kPerWarp][4], int64_t width, __half* to, float* unscale) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const float scale = row_scale<kRowThreads / 32>(v, width);
  if (threadIdx.x == 0) *unscale = 1 / scale;
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    const int64_t first = int64_t{b * (kRowThreads / 32) + warp} * 128 + 4 * lane;
    if (first >= width) break;
    const __half2 low = __floats2half2_rn(v[b][0] * scale, v[b][1] * scale);
    const __half2 high = __floats2half2_rn(v[b][2] * scale, v[b][3] * scale);
    *reinterpret_cast<uint2*>(to + first) = {reinterpret_cast<const uint32_t&>(low),
                                             reinterpret_cast<const uint32_t&>(high)};
  }
}

/// Block (pair, matrix).
__global__ void __launch_bounds__(kRowThreads) prepare(Grouped job) {
  const int pair = static_cast<int>(blockIdx.x), matrix = static_cast<int>(blockIdx.y);
  const int32_t position = job.place[pair];
  if (position < 0) return;
  const void* suh = (matrix == 0 ? job.gate : job.up)[expert_of(job, pair)].suh;
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  float v[kPerWarp][4];
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    const int64_t first = int64_t{b * (kRowThreads / 32) + warp} * 128 + 4 * lane;
    if (first >= job.hidden) break;
    const float4 s = halves(suh, first), x = four(job.x, pair / job.k, first);
    v[b][0] = x.x * s.x;
    v[b][1] = x.y * s.y;
    v[b][2] = x.z * s.z;
    v[b][3] = x.w * s.w;
    hadamard128(v[b]);
  }
  store_row(v, job.hidden, (matrix == 0 ? job.x_gate : job.x_up) + position * job.hidden,
            job.unscale + matrix * job.pairs + position);
}

/// Block (position): SwiGLU and the inputs of down.
__global__ void __launch_bounds__(kRowThreads) activate(Grouped job) {
  const int position = static_cast<int>(blockIdx.x);
  const int32_t pair = job.order[position];
  if (pair < 0) return;
  const void* suh = job.down[expert_of(job, pair)].suh;
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  float v[kPerWarp][4];
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    const int64_t first = int64_t{b * (kRowThreads / 32) + warp} * 128 + 4 * lane;
    if (first >= job.inter) break;
    const float4 s = halves(suh, first);
    const float4 g = *reinterpret_cast<const float4*>(job.gates + position * job.inter + first);
    const float4 u = *reinterpret_cast<const float4*>(job.ups + position * job.inter + first);
    v[b][0] = swiglu_value(g.x, u.x, job.limit) * s.x;
    v[b][1] = swiglu_value(g.y, u.y, job.limit) * s.y;
    v[b][2] = swiglu_value(g.z, u.z, job.limit) * s.z;
    v[b][3] = swiglu_value(g.w, u.w, job.limit) * s.w;
    hadamard128(v[b]);
  }
  store_row(v, job.inter, job.x_down + position * job.inter, job.unscale + 2 * job.pairs + position);
}

/// Where 16 bytes of a stage lie: rows of 64 bytes, turned so that eight rows of a column use all banks.
__device__ int stage_place(int row, int chunk) {
  return row * kStep + ((chunk ^ ((row >> 1) & 3)) << 3);
}

/// Puts inputs [step · kStep, +kStep) of the segment's rows into a stage; zeros where there is no row.
__device__ void load_stage(__half* stage, const __half* x, int64_t width, int step, int count) {
#pragma unroll
  for (int i = 0; i < kSegment * kStep / 8 / (32 * kWarps); ++i) {
    const int item = i * 32 * kWarps + static_cast<int>(threadIdx.x), row = item / (kStep / 8),
              chunk = item % (kStep / 8);
    const bool live = row < count && step * kStep + 8 * chunk < width;
    copy_async16(shared_address(stage + stage_place(row, chunk)),
                 x + (live ? row * width + step * kStep + 8 * chunk : 0), live);
  }
}

/// This warp's two tiles of codes for the 16-wide steps of a stage.
struct Codes {
  uint32_t words[kParts][2];
  __device__ void load(const uint32_t* from, int64_t step_words, int parts) {
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
#pragma unroll
      for (int t = 0; t < 2; ++t) words[k][t] = k < parts ? __ldg(from + k * step_words + 32 * t) : 0;
    }
  }
};

/// The B fragments of one 16-wide step.
struct Decoded {
  uint32_t b[2][4];
  __device__ void set(const Codes& codes, int k) {
    const int before = (static_cast<int>(threadIdx.x) + 31) & 31;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      decode_tile4(__shfl_sync(0xffffffffU, codes.words[k][t], before), codes.words[k][t], b[t]);
    }
  }
};

/// acc += one stage: kTiles · 16 rows against this warp's 32 outputs.
template <int kTiles>
__device__ void multiply_stage(const __half* stage, const Codes& codes, float (&acc)[kTiles][4][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      load_matrix4(a[m], shared_address(stage + stage_place(16 * m + (lane & 15), 2 * k + (lane >> 4))));
    }
    Decoded now;
    now.set(codes, k);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma_f16(acc[m][2 * t], a[m][0], a[m][1], a[m][2], a[m][3], now.b[t][0], now.b[t][2]);
        mma_f16(acc[m][2 * t + 1], a[m][0], a[m][1], a[m][2], a[m][3], now.b[t][1], now.b[t][3]);
      }
    }
  }
}

/// Rotates the block's outputs of each row, 128 at a time, and stores them.
template <int kTiles>
__device__ void store_outputs(float (*room)[kBlockOut + 4], const float (&acc)[kTiles][4][4], int count,
                              const float* unscale, const void* svh, int64_t column, float* out, int64_t width) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int g = lane >> 2, q = lane & 3, half = warp & 1;
  const int64_t mine = column + 128 * half + 4 * lane;
  const float4 s = mine < width ? halves(svh, mine) : float4{};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        *reinterpret_cast<float2*>(&room[g + 4 * c][32 * warp + 8 * n + 2 * q]) = {acc[m][n][c], acc[m][n][c + 1]};
      }
    }
    __syncthreads();
    for (int r = warp / 2; r < 16 && 16 * m + r < count && mine < width; r += kWarps / 2) {
      const float4 t = *reinterpret_cast<const float4*>(&room[r][128 * half + 4 * lane]);
      float v[4] = {t.x, t.y, t.z, t.w};
      hadamard128(v);
      const float f = unscale[16 * m + r];
      *reinterpret_cast<float4*>(out + (16 * m + r) * width + mine) = {v[0] * f * s.x, v[1] * f * s.y, v[2] * f * s.z,
                                                                       v[3] * f * s.w};
    }
  }
}

union Room {
  __half stages[kStages][kStageHalves];
  float rows[16][kBlockOut + 4];
};

/// A block's part of one matrix.
struct Product {
  const __half* x;        ///< the segment's rows
  const uint32_t* codes;  ///< this lane's word of the warp's first tile
  const void* svh;
  const float* unscale;
  float* out;  ///< the segment's rows
  int64_t in, width, step_words, column;
  int count;
  bool live;  ///< false for warps past the last output: they only help with the inputs
};

/// The whole of it, for up to 16 · kTiles rows.
template <int kTiles>
__device__ void multiply_rows(Room& room, const Product& p) {
  const int parts_left = static_cast<int>(p.in / 16), stages = (parts_left + kParts - 1) / kParts;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < stages) load_stage(room.stages[s], p.x, p.in, s, p.count);
    copy_commit();
  }
  Codes ring[2];
  ring[0].load(p.codes, p.step_words, parts_left);
  if (stages > 1) ring[1].load(p.codes + kParts * p.step_words, p.step_words, parts_left - kParts);
  float acc[kTiles][4][4] = {};
  for (int step = 0; step < stages; step += 2) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (step + s >= stages) break;
      copy_wait<kStages - 2>();
      __syncthreads();
      const int next = step + s + kStages - 1;
      if (next < stages) load_stage(room.stages[next % kStages], p.x, p.in, next, p.count);
      copy_commit();
      const Codes now = ring[s];
      const int after = (step + s + 2) * kParts;
      if (after < parts_left) ring[s].load(p.codes + after * p.step_words, p.step_words, parts_left - after);
      if (p.live) multiply_stage<kTiles>(room.stages[(step + s) % kStages], now, acc);
    }
  }
  copy_wait<0>();
  store_outputs<kTiles>(room.rows, acc, p.count, p.unscale, p.svh, p.column, p.out, p.width);
}

/// Block (output block · matrices, segment).
template <bool kDown>
__global__ void __launch_bounds__(32 * kWarps, 2) multiply(Grouped job) {
  __shared__ __align__(128) Room room;
  if (static_cast<int32_t>(blockIdx.y) >= *job.segment_count) return;
  const Segment segment = job.segments[blockIdx.y];
  const int matrix = kDown ? 2 : static_cast<int>(blockIdx.x) & 1;
  const int64_t block = kDown ? blockIdx.x : blockIdx.x >> 1;
  const Linear& w = (kDown ? job.down : matrix == 0 ? job.gate : job.up)[segment.expert];
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  Product p;
  p.in = kDown ? job.inter : job.hidden;
  p.width = kDown ? job.hidden : job.inter;
  p.step_words = p.width / 16 * 32;
  p.column = block * kBlockOut;
  p.count = segment.count;
  const int64_t tile = p.column / 16 + 2 * warp;
  p.live = 16 * tile < p.width;
  p.codes = static_cast<const uint32_t*>(w.codes) + (p.live ? tile : 0) * 32 + lane;
  p.svh = w.svh;
  p.x = (kDown ? job.x_down : matrix == 0 ? job.x_gate : job.x_up) + segment.first * p.in;
  p.unscale = job.unscale + (matrix == 1 ? job.up_scale : matrix) * job.pairs + segment.first;
  p.out = (kDown ? job.outputs : matrix == 0 ? job.gates : job.ups) + segment.first * p.width;
  if (p.count <= 16) return multiply_rows<1>(room, p);
  if (p.count <= 32) return multiply_rows<2>(room, p);
  if (p.count <= 48) return multiply_rows<3>(room, p);
  multiply_rows<4>(room, p);
}

/// out[row] = Σ weight · output of its pairs, in their order.
__global__ void combine_rows(Grouped job, Matrix weight, Matrix out) {
  const int64_t row = blockIdx.x, d = 4 * (int64_t{blockIdx.y} * blockDim.x + threadIdx.x);
  if (d >= out.columns) return;
  float4 total{};
  for (int j = 0; j < job.k; ++j) {
    const int64_t position = job.place[row * job.k + j];
    if (position < 0) continue;
    const float s = at(weight, row, j);
    const float4 v = *reinterpret_cast<const float4*>(job.outputs + position * job.hidden + d);
    total = {total.x + s * v.x, total.y + s * v.y, total.z + s * v.z, total.w + s * v.w};
  }
  put(out, row, d, total.x);
  put(out, row, d + 1, total.y);
  put(out, row, d + 2, total.z);
  put(out, row, d + 3, total.w);
}

unsigned parts(int64_t n, int64_t of) {
  return static_cast<unsigned>((n + of - 1) / of);
}

MoeArgs rows_of_moe(const MoeArgs& all, int64_t begin, int64_t end, bool window) {
  MoeArgs part = all;
  part.x = all.x.rows(begin, end);
  part.index = all.index.rows(begin, end);
  part.weight = all.weight.rows(begin, end);
  part.out = all.out.rows(begin, end);
  part.window_rows = window ? static_cast<int>(end - begin) : 0;
  return part;
}

}  // namespace

bool CudaOps::moe_grouped(const MoeArgs& args, const PackedExperts& packed) {
  const std::string_view op = "moe";
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1), k = args.index.dim(1), inter = args.gate.front().out;
  const int64_t pairs = rows * k, experts = static_cast<int64_t>(args.gate.size());
  const bool aligned = reinterpret_cast<uintptr_t>(args.x.data) % 8 == 0 && args.x.stride[0] % 4 == 0;
  if (hidden > kMaxWidth || inter > kMaxWidth || experts > kMaxExperts || !aligned) return false;
  Grouped job{};
  job.index = static_cast<const int32_t*>(args.index.data);
  job.index_stride = args.index.stride[0];
  job.k = static_cast<int32_t>(k);
  job.pairs = static_cast<int32_t>(pairs);
  job.experts = static_cast<int32_t>(experts);
  job.hidden = hidden;
  job.inter = inter;
  job.gate = packed.gate;
  job.up = packed.up;
  job.down = packed.down;
  job.x = matrix(op, "x", args.x, {rows, hidden});
  job.limit = args.limit;
  const auto n = static_cast<size_t>(pairs), wide = static_cast<size_t>(hidden), narrow = static_cast<size_t>(inter);
  const int64_t most = std::min(pairs, (pairs + experts * (kSegment - 1)) / kSegment);
  job.order = scratch<int32_t>(Area::order, 5 * n + 3 * static_cast<size_t>(most) + 1);
  job.place = job.order + n;
  job.unscale = reinterpret_cast<float*>(job.place + n);
  job.segments = reinterpret_cast<Segment*>(job.unscale + 3 * n);
  job.segment_count = reinterpret_cast<int32_t*>(job.segments + most);
  const size_t inputs = packed.same_inputs ? 1 : 2;
  job.x_gate = scratch<__half>(Area::rotated, n * (inputs * wide + narrow));
  job.x_up = job.x_gate + (inputs - 1) * n * wide;
  job.x_down = job.x_up + n * wide;
  job.up_scale = static_cast<int32_t>(inputs - 1);
  job.gates = scratch<float>(Area::gate, 2 * n * narrow);
  job.ups = job.gates + n * narrow;
  job.outputs = scratch<float>(Area::pairs, n * wide);
  const cudaStream_t on = stream();
  const auto all = static_cast<unsigned>(pairs), segments = static_cast<unsigned>(most);
  check(cudaMemsetAsync(job.order, 0xff, n * sizeof(int32_t), on), op);
  sort_pairs<<<1, kSortThreads, 0, on>>>(job);
  prepare<<<dim3(all, static_cast<unsigned>(inputs)), kRowThreads, 0, on>>>(job);
  multiply<false><<<dim3(2 * parts(inter, kBlockOut), segments), 32 * kWarps, 0, on>>>(job);
  activate<<<all, kRowThreads, 0, on>>>(job);
  multiply<true><<<dim3(parts(hidden, kBlockOut), segments), 32 * kWarps, 0, on>>>(job);
  combine_rows<<<dim3(static_cast<unsigned>(rows), parts(hidden, 1024)), 256, 0, on>>>(
      job, matrix(op, "weight", args.weight, {rows, k}), matrix(op, "out", args.out, {rows, hidden}));
  check(cudaGetLastError(), op);
  return true;
}

bool CudaOps::moe_packed(const MoeArgs& args) {
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1), k = args.index.dim(1), inter = args.gate.front().out;
  if (args.x.dtype != Dtype::bf16 || k == 0) return false;
  const ExpertTable& gate = expert_table(args.gate, "gate", inter, hidden);
  const ExpertTable& up = expert_table(args.up, "up", inter, hidden);
  const ExpertTable& down = expert_table(args.down, "down", hidden, inter);
  if (!gate.packed || !up.packed || !down.packed) return false;
  const auto table = [](const ExpertTable& t) { return reinterpret_cast<const Linear*>(t.device.data()); };
  const PackedExperts packed{table(gate), table(up), table(down), same_inputs(gate, args.up, hidden)};
  constexpr int64_t kWindowPairs = 512;  // a window of more is cut: its rows do not depend on one another
  const int64_t window = std::min<int64_t>(args.window_rows, rows), most = std::max<int64_t>(1, kWindowPairs / k);
  for (int64_t first = 0; first < window; first += most) {
    const MoeArgs part = rows_of_moe(args, first, std::min(first + most, window), true);
    if (!moe_window(part, packed)) return false;
  }
  return window == rows || moe_grouped(rows_of_moe(args, window, rows, false), packed);
}

}  // namespace glm53::cuda
