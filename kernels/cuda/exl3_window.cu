// The mixture of experts for few rows (decode, verify): 4-bit MCG trellises decoded in registers into tensor-core
// fragments (spec exl3 §6.6). Time follows the number of distinct experts, not of rows: up to 8 pairs (row, expert) of
// one expert share a decoding.
//
//   prepare     rotated inputs of gate and up
//   project     gate and up: partial sums over a slice of inputs           (a block: 128 outputs of one matrix)
//   activate    partial sums -> rotated outputs -> SwiGLU -> rotated inputs of down
//   project     down, with the rotation of its outputs
//   combine     Σ weight · expert, in ascending expert id
//
// Every pair has blocks; those of a pair that is not the first of eight of its expert leave at once. Rows are columns
// of the B operand and never meet; slices depend on the weights' shape alone. So a row has the same bits whatever else
// is in the batch.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/trellis.cuh"

namespace glm53::cuda {
namespace {

constexpr int kGroup = 8;        // pairs of one expert that share a decoding: the columns of a B fragment
constexpr int kInWarps = 4;      // of a block of gate and up, whose steps they share
constexpr int kDownWarps = 4;    // of a block of down
constexpr int kSliceSteps = 64;  // 16-wide steps of a slice of gate and up
constexpr int kAhead = 1;        // steps whose codes are under way
constexpr int kMaxPairs = 512;
constexpr int kMaxWidth = 4096;  // of hidden and intermediate vectors
constexpr int kThreads = 256;    // of a block that has one row
constexpr int kPerWarp = kMaxWidth / 128 / (kThreads / 32);

/// What a pair's blocks need, in one place: following index, expert table and pointers costs three trips to memory.
struct alignas(16) Pair {
  int32_t expert, count;  ///< of the members below; 0 when the pair is not the first of its group
  int32_t members[kGroup];
  const void *codes[3], *svh[3], *suh;  ///< gate, up, down; of down
};

/// One MoE call as its kernels see it. A pair is row · k + choice.
struct Packed {
  const int32_t* index;
  int64_t index_stride;
  int32_t k, pairs, slices;
  int64_t hidden, inter;
  const Linear *gate, *up, *down;
  Matrix x;
  float limit;
  Pair* records;          ///< [pairs]
  __half *x_in, *x_down;  ///< [2][pairs][hidden] and [pairs][inter]: rotated inputs in fragment order
  float* unscale;         ///< [3][pairs]: factors back from the inputs of gate, up and down
  float* sums;            ///< [2][slices][pairs][inter]
  float* outputs;         ///< [pairs][hidden]
};

__device__ int32_t expert_of(const Packed& job, int pair) {
  return job.index[pair / job.k * job.index_stride + pair % job.k];
}

/// Writes the record of a pair; one warp does.
__device__ void describe(const Packed& job, int pair, int32_t expert) {
  Pair& record = job.records[pair];
  const int lane = static_cast<int>(threadIdx.x & 31U);
  int before = 0, found = 0;
  for (int base = 0; base < job.pairs; base += 32) {
    const int other = base + lane;
    const bool same = other < job.pairs && expert_of(job, other) == expert;
    before += __popc(__ballot_sync(0xffffffffU, same && other < pair));
    const uint32_t later = __ballot_sync(0xffffffffU, same && other >= pair);
    const int place = found + __popc(later & ((1U << lane) - 1U));
    if (same && other >= pair && place < kGroup) record.members[place] = other;
    found += __popc(later);
  }
  if (lane < 3) {
    const Linear& w = (lane == 0 ? job.gate : lane == 1 ? job.up : job.down)[max(expert, 0)];
    record.codes[lane] = w.codes;
    record.svh[lane] = w.svh;
    if (lane == 2) record.suh = w.suh;
  }
  if (lane == 0) {
    record.expert = expert;
    record.count = expert >= 0 && before % kGroup == 0 ? min(found, kGroup) : 0;
  }
}

/// Stores the block's rotated row in fp16 and fragment order; the factor back goes to `unscale`.
__device__ void store_row(const float (&v)[kPerWarp][4], int64_t width, __half* to, float* unscale) {
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const float scale = row_scale<kThreads / 32>(v, width);
  if (threadIdx.x == 0) *unscale = 1 / scale;
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    const int64_t first = int64_t{b * (kThreads / 32) + warp} * 128 + 4 * lane;
    if (first < width) store_four(to, first, v[b], scale);
  }
}

/// Block (pair, matrix): the pair's record and inputs of gate or up.
__global__ void __launch_bounds__(kThreads) prepare(Packed job) {
  after_previous();
  const int pair = static_cast<int>(blockIdx.x), matrix = static_cast<int>(blockIdx.y);
  const int32_t expert = expert_of(job, pair);
  if (matrix == 0 && threadIdx.x < 32) describe(job, pair, expert);
  if (expert < 0) return;
  const void* suh = (matrix == 0 ? job.gate : job.up)[expert].suh;
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  float v[kPerWarp][4];
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    const int64_t first = int64_t{b * (kThreads / 32) + warp} * 128 + 4 * lane;
    if (first >= job.hidden) break;
    const float4 s = halves(suh, first), x = four(job.x, pair / job.k, first);
    v[b][0] = x.x * s.x;
    v[b][1] = x.y * s.y;
    v[b][2] = x.z * s.z;
    v[b][3] = x.w * s.w;
    hadamard128(v[b]);
  }
  const int64_t place = int64_t{matrix} * job.pairs + pair;
  store_row(v, job.hidden, job.x_in + place * job.hidden, job.unscale + place);
}

/// The codes of a warp's steps, `kAhead` steps under way.
struct CodeRing {
  const uint32_t* codes;  ///< this lane's word of the first step
  int64_t step_words;
  int steps;
  uint32_t words[kAhead][8];

  __device__ void load(int slot, int step) {
    if (step >= steps) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) words[slot][i] = load_once(codes + step * step_words + 32 * i);
  }
  __device__ void start() {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) load(s, s);
  }
  /// acc += the products of all steps; input(step) gives this lane's four inputs.
  template <class Input>
  __device__ void run(const Input& input, float (&acc)[8][4]) {
    const int before = (static_cast<int>(threadIdx.x) + 31) & 31;
    for (int step = 0; step < steps; step += kAhead) {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (step + s >= steps) break;
        const uint2 b = input(step + s);
        uint32_t now[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) now[i] = words[s][i];
        load(s, step + s + kAhead);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t a[4];
          decode_tile4(__shfl_sync(0xffffffffU, now[i], before), now[i], a);
          mma_f16(acc[i], a[0], a[1], a[2], a[3], b.x, b.y);
        }
      }
    }
  }
};

using Sums = float[kGroup][128 + 4];

/// Leaves the warp's products as rows.
__device__ void leave(const float (&acc)[8][4], Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x & 31U), g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[2 * q + (c & 1)][16 * i + g + 8 * (c >> 1)] = acc[i][c];
  }
}
/// Block (output block · matrices · slices, pair): sums of gate or up over a slice, or finished outputs of down.
template <bool kDown, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) project(Packed job) {
  __shared__ Sums sums[kWarps];
  const int pair = static_cast<int>(blockIdx.y), matrix = kDown ? 2 : static_cast<int>(blockIdx.x) & 1;
  const int slices = kDown ? 1 : job.slices, rest = static_cast<int>(kDown ? blockIdx.x : blockIdx.x >> 1);
  const int slice = rest % slices, block = rest / slices;
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const int64_t in = kDown ? job.inter : job.hidden, out = kDown ? job.hidden : job.inter;
  if constexpr (!kDown) after_previous();
  // For down the records are older than the kernel before, which has waited for them.
  const Pair& record = job.records[pair];
  const int count = record.count;
  if (count == 0) {
    if constexpr (kDown) after_previous();
    return;
  }
  const int steps = static_cast<int>(in / 16), of_slice = kDown ? steps : kSliceSteps;
  const int each = (of_slice + kWarps - 1) / kWarps, begin = slice * of_slice + warp * each;
  CodeRing ring;
  ring.step_words = out / 16 * 32;
  ring.steps = max(0, min(min(each, (slice + 1) * of_slice - begin), steps - begin));
  ring.codes = static_cast<const uint32_t*>(record.codes[matrix]) + begin * ring.step_words + block * 256 + lane;
  ring.start();
  if constexpr (kDown) after_previous();
  const int g = lane >> 2, q = lane & 3;
  const bool live = g < count;
  const __half* rows = kDown ? job.x_down : job.x_in + int64_t{matrix} * job.pairs * in;
  const __half* x = rows + (live ? record.members[g] : 0) * in + begin * 16 + 4 * q;
  float acc[8][4] = {};
  ring.run([&](int step) { return live ? __ldg(reinterpret_cast<const uint2*>(x + 16 * step)) : uint2{}; }, acc);
  leave(acc, sums[warp]);
  __syncthreads();
  for (int r = warp; r < count; r += kWarps) {
    const int member = record.members[r];
    const float unscale = job.unscale[matrix * job.pairs + member];
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = sums[0][r][4 * lane + j];
#pragma unroll
      for (int other = 1; other < kWarps; ++other) v[j] += sums[other][r][4 * lane + j];
      v[j] *= unscale;
    }
    float* to = job.sums + ((int64_t{matrix} * slices + slice) * job.pairs + member) * job.inter;
    if constexpr (kDown) {
      hadamard128(v);
      const float4 s = halves(record.svh[2], int64_t{block} * 128 + 4 * lane);
      v[0] *= s.x;
      v[1] *= s.y;
      v[2] *= s.z;
      v[3] *= s.w;
      to = job.outputs + member * job.hidden;
    }
    *reinterpret_cast<float4*>(to + int64_t{block} * 128 + 4 * lane) = {v[0], v[1], v[2], v[3]};
  }
}

/// Gate or up of 128 outputs: the slices' sums, rotated.
__device__ void gather(const Packed& job, int matrix, int pair, const void* svh, int64_t first, float (&v)[4]) {
  const int64_t stride = job.pairs * job.inter;
  const float* from = job.sums + int64_t{matrix} * job.slices * stride + pair * job.inter + first;
  v[0] = v[1] = v[2] = v[3] = 0;
  for (int s = 0; s < job.slices; ++s) {
    const float4 more = *reinterpret_cast<const float4*>(from + s * stride);
    v[0] += more.x;
    v[1] += more.y;
    v[2] += more.z;
    v[3] += more.w;
  }
  hadamard128(v);
  const float4 s = halves(svh, first);
  v[0] *= s.x;
  v[1] *= s.y;
  v[2] *= s.z;
  v[3] *= s.w;
}

/// Block (pair): its inputs of down.
__global__ void __launch_bounds__(kThreads) activate(Packed job) {
  after_previous();
  const int pair = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31U);
  const Pair& record = job.records[pair];
  if (record.expert < 0) return;
  float v[kPerWarp][4];
#pragma unroll
  for (int b = 0; b < kPerWarp; ++b) {
    const int64_t first = int64_t{b * (kThreads / 32) + warp} * 128 + 4 * lane;
    if (first >= job.inter) break;
    float up[4];
    gather(job, 0, pair, record.svh[0], first, v[b]);
    gather(job, 1, pair, record.svh[1], first, up);
    const float4 s = halves(record.suh, first);
    v[b][0] = swiglu_value(v[b][0], up[0], job.limit) * s.x;
    v[b][1] = swiglu_value(v[b][1], up[1], job.limit) * s.y;
    v[b][2] = swiglu_value(v[b][2], up[2], job.limit) * s.z;
    v[b][3] = swiglu_value(v[b][3], up[3], job.limit) * s.w;
    hadamard128(v[b]);
  }
  store_row(v, job.inter, job.x_down + pair * job.inter, job.unscale + 2 * job.pairs + pair);
}

/// out[row] = Σ weight · output of its pairs, in their order.
__global__ void combine_pairs(Packed job, Matrix weight, Matrix out) {
  after_previous();
  const int64_t row = blockIdx.x, d = 4 * (int64_t{blockIdx.y} * blockDim.x + threadIdx.x);
  if (d >= out.columns) return;
  float4 total{};
  for (int j = 0; j < job.k; ++j) {
    const int64_t pair = row * job.k + j;
    if (expert_of(job, static_cast<int>(pair)) < 0) continue;
    const float s = at(weight, row, j);
    const float4 v = *reinterpret_cast<const float4*>(job.outputs + pair * job.hidden + d);
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

}  // namespace

bool CudaOps::moe_window(const MoeArgs& args, const PackedExperts& packed) {
  const std::string_view op = "moe";
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1), k = args.index.dim(1), inter = args.gate.front().out;
  const int64_t pairs = rows * k;
  const bool aligned = reinterpret_cast<uintptr_t>(args.x.data) % 8 == 0 && args.x.stride[0] % 4 == 0;
  if (hidden > kMaxWidth || inter > kMaxWidth || pairs > kMaxPairs || !aligned) return false;
  Packed job{};
  job.index = static_cast<const int32_t*>(args.index.data);
  job.index_stride = args.index.stride[0];
  job.k = static_cast<int32_t>(k);
  job.pairs = static_cast<int32_t>(pairs);
  job.slices = static_cast<int32_t>(parts(hidden, 16 * kSliceSteps));
  job.hidden = hidden;
  job.inter = inter;
  job.gate = packed.gate;
  job.up = packed.up;
  job.down = packed.down;
  job.x = matrix(op, "x", args.x, {rows, hidden});
  job.limit = args.limit;
  const auto n = static_cast<size_t>(pairs), wide = static_cast<size_t>(hidden), narrow = static_cast<size_t>(inter);
  job.records = scratch<Pair>(Area::order, n + (3 * n * sizeof(float) + sizeof(Pair) - 1) / sizeof(Pair));
  job.unscale = reinterpret_cast<float*>(job.records + n);
  job.x_in = scratch<__half>(Area::rotated, n * (2 * wide + narrow));
  job.x_down = job.x_in + 2 * n * wide;
  job.sums = scratch<float>(Area::gate, 2 * static_cast<size_t>(job.slices) * n * narrow);
  job.outputs = scratch<float>(Area::pairs, n * wide);
  const cudaStream_t on = stream();
  const auto all = static_cast<unsigned>(pairs);
  const auto blocks = static_cast<unsigned>(inter / 128 * 2 * job.slices);
  launch_next(prepare, dim3(all, 2), kThreads, on, job);
  launch_next(project<false, kInWarps>, dim3(blocks, all), 32 * kInWarps, on, job);
  launch_next(activate, all, kThreads, on, job);
  launch_next(project<true, kDownWarps>, dim3(static_cast<unsigned>(hidden / 128), all), 32 * kDownWarps, on, job);
  launch_next(combine_pairs, dim3(static_cast<unsigned>(rows), parts(hidden, 1024)), 256, on, job,
              matrix(op, "weight", args.weight, {rows, k}), matrix(op, "out", args.out, {rows, hidden}));
  return true;
}

}  // namespace glm53::cuda
