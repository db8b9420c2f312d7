// EXL3 linears and the mixture of experts (spec exl3 §3.2, model §6): rotate the inputs, decode the trellis on the fly
// against them, rotate the outputs; everything between in f32. Every pair (row, expert) is computed as if alone.
#include <algorithm>

#include "common/error.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"

namespace glm53::cuda {
namespace {

constexpr int kBlock = 128;      // outputs of a block: the width of the rotation
constexpr int kDepthGroups = 4;  // threads that share an output, each with every fourth row of tiles
constexpr int kRowTile = 8;      // rows of one weight that share a decoding

/// Value of a 16-bit state (spec exl3 §2).
__device__ float code_value(int codebook, uint32_t state) {
  if (codebook == 2) {
    const uint32_t p = state * 0x83dcd12dU;
    const uint32_t sum = (p & 255U) + ((p >> 8) & 255U) + ((p >> 16) & 255U) + (p >> 24);
    const float exact = fmaf(1024.0F + static_cast<float>(sum), 0.00676727294921875F, -10.3828125F);
    return __half2float(__float2half_rn(exact));
  }
  const uint32_t p = codebook == 1 ? state * 0xcbac1fedU : state * 89226354U + 64248484U;
  const uint32_t q = (p & 0x8fff8fffU) ^ 0x3b603b60U;
  const float low = __half2float(__ushort_as_half(static_cast<unsigned short>(q & 0xffffU)));
  const float high = __half2float(__ushort_as_half(static_cast<unsigned short>(q >> 16)));
  return __half2float(__float2half_rn(low + high));
}

/// Element (k, n) of a 16×16 tile.
__device__ float tile_value(const uint32_t* words, int bits, int codebook, unsigned k, unsigned n) {
  const unsigned lane = (n & 7U) << 2 | (k & 7U) >> 1, j = (n >> 3) << 2 | (k >> 3) << 1 | (k & 1U);
  const unsigned i = lane << 3 | j, width = 8U * static_cast<unsigned>(bits), total = 32U * width;
  const unsigned end = (i + 1U) * static_cast<unsigned>(bits);
  const uint32_t high = words[(end + total - 16U) / 32U % width], low = words[(end - 1U) / 32U % width];
  return code_value(codebook, __funnelshift_r(low, high, (32U - end % 32U) % 32U) & 0xffffU);
}

/// Which inputs and which expert belong to an item of work; index null: item i is row i of the one linear.
struct Items {
  const int32_t* index;
  int64_t index_stride, k;
  const Linear* linears;
  Linear one;
};
__device__ int32_t expert_of(const Items& items, int64_t item) {
  return items.index == nullptr ? 0 : items.index[item / items.k * items.index_stride + item % items.k];
}
__device__ Linear linear_of(const Items& items, int32_t expert) {
  return items.index == nullptr ? items.one : items.linears[expert];
}

/// prepared[item] = H(x ⊙ suh), or x itself where the weight is plain. x has a row an item, or one for k items.
__global__ void prepare_inputs(Items items, Matrix x, int64_t items_per_row, float* prepared, int64_t in) {
  __shared__ float v[kBlock];
  const int64_t item = blockIdx.x, first = int64_t{blockIdx.y} * kBlock;
  const int32_t expert = expert_of(items, item);
  if (expert < 0) return;
  const Linear w = linear_of(items, expert);
  const int64_t i = first + threadIdx.x;
  v[threadIdx.x] = i < in ? at(x, item / items_per_row, i) : 0.0F;
  if (w.bits != 0) {
    v[threadIdx.x] *= __half2float(static_cast<const __half*>(w.suh)[i]);
    hadamard128(v, threadIdx.x, true);
  }
  if (i < in) prepared[item * in + i] = v[threadIdx.x];
}

/// One block of 128 outputs for `rows` prepared inputs of an EXL3 weight. sum is [kDepthGroups][kRowTile][128].
template <int Tile>
__device__ void trellis_block(const Linear& w, int64_t in, int64_t out, int64_t block, const float* x, int rows,
                              float (*sum)[Tile][kBlock]) {
  const unsigned n = threadIdx.x % kBlock, group = threadIdx.x / kBlock;
  const int64_t words = 8 * int64_t{w.bits}, tiles = out / 16;
  float acc[Tile] = {};
  for (int64_t tk = group; tk < in / 16; tk += kDepthGroups) {
    const auto* tile = static_cast<const uint32_t*>(w.codes) + (tk * tiles + block * 8 + n / 16) * words;
    for (unsigned k = 0; k < 16; ++k) {
      const float value = tile_value(tile, w.bits, w.codebook, k, n % 16);
#pragma unroll
      for (int r = 0; r < Tile; ++r) {
        if (r < rows) acc[r] = fmaf(x[r * in + tk * 16 + k], value, acc[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Tile; ++r) sum[group][r][n] = acc[r];
  __syncthreads();
  for (int r = 0; r < rows; ++r) {
    if (group == 0) {
      for (int g = 1; g < kDepthGroups; ++g) sum[0][r][n] += sum[g][r][n];
    }
    hadamard128(sum[0][r], n, group == 0);
    if (group == 0) sum[0][r][n] *= __half2float(static_cast<const __half*>(w.svh)[block * kBlock + n]);
  }
}

__global__ void linear_trellis(Linear w, int64_t in, int64_t out, const float* prepared, Matrix y, float beta) {
  __shared__ float sum[kDepthGroups][kRowTile][kBlock];
  const int64_t block = blockIdx.x, first = int64_t{blockIdx.y} * kRowTile;
  const int rows = static_cast<int>(min(int64_t{kRowTile}, y.rows - first));
  trellis_block<kRowTile>(w, in, out, block, prepared + first * in, rows, sum);
  if (threadIdx.x >= kBlock) return;
  const int64_t o = block * kBlock + threadIdx.x;
  for (int r = 0; r < rows; ++r) {
    const float v = sum[0][r][threadIdx.x];
    put(y, first + r, o, beta == 0 ? v : v + beta * at(y, first + r, o));
  }
}

/// out[item] = W of its expert times its prepared input.
__global__ void project(Items items, const float* prepared, int64_t in, float* out, int64_t width) {
  __shared__ float sum[kDepthGroups][1][kBlock];
  const int64_t item = blockIdx.x, block = blockIdx.y;
  const int32_t expert = expert_of(items, item);
  if (expert < 0) return;
  const Linear w = linear_of(items, expert);
  const float* x = prepared + item * in;
  if (w.bits != 0) {
    trellis_block<1>(w, in, width, block, x, 1, sum);
    if (threadIdx.x < kBlock) out[item * width + block * kBlock + threadIdx.x] = sum[0][0][threadIdx.x];
    return;
  }
  const unsigned lane = threadIdx.x & 31U;
  for (int64_t o = block * kBlock + (threadIdx.x >> 5); o < min((block + 1) * kBlock, width); o += blockDim.x / 32) {
    float v = 0;
    for (int64_t i = lane; i < in; i += 32) v = fmaf(load(w.codes, w.bf16 != 0, o * in + i), x[i], v);
    v = warp_sum(v);
    if (lane == 0) out[item * width + o] = v;
  }
}

__global__ void activate(float* gate, const float* up, int64_t n, float limit) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) gate[i] = swiglu_value(gate[i], up[i], limit);
}

/// out[r] = Σ weight · down of its items, in their order: ascending expert id.
__global__ void combine(const int32_t* index, int64_t index_stride, Matrix weight, int64_t k, const float* down,
                        Matrix out) {
  const int64_t row = blockIdx.x, d = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (d >= out.columns) return;
  float total = 0;
  for (int64_t j = 0; j < k; ++j) {
    if (index[row * index_stride + j] >= 0) total += at(weight, row, j) * down[(row * k + j) * out.columns + d];
  }
  put(out, row, d, total);
}

unsigned parts(int64_t n, int64_t of) {
  return static_cast<unsigned>((n + of - 1) / of);
}

}  // namespace

void CudaOps::linear_exl3(const Linear& w, int64_t out, int64_t in, Matrix x, Matrix y, float beta) {
  const cudaStream_t on = stream();
  auto* prepared = scratch<float>(Area::rotated, static_cast<size_t>(x.rows * in));
  prepare_inputs<<<dim3(static_cast<unsigned>(x.rows), parts(in, kBlock)), kBlock, 0, on>>>({nullptr, 0, 1, nullptr, w},
                                                                                            x, 1, prepared, in);
  check(cudaGetLastError(), "linear");
  linear_trellis<<<dim3(parts(out, kBlock), parts(x.rows, kRowTile)), kBlock * kDepthGroups, 0, on>>>(
      w, in, out, prepared, y, beta);
  check(cudaGetLastError(), "linear");
}

const CudaOps::ExpertTable& CudaOps::expert_table(std::span<const Weight> all, std::string_view argument, int64_t out,
                                                  int64_t in) {
  std::vector<Linear> views;
  views.reserve(all.size());
  for (const Weight& w : all) views.push_back(linear_view("moe", argument, w, out, in));
  ExpertTable& table = experts_[all.data()];
  const size_t bytes = views.size() * sizeof(Linear);
  if (table.host == views) return table;
  if (capturing_) throw Error(Code::internal, "moe: a graph is captured before its experts were used once");
  synchronize();
  Buffer device = allocate(bytes, Place::device);
  check(cudaMemcpyAsync(device.data(), views.data(), bytes, cudaMemcpyHostToDevice, stream()), "send expert views");
  synchronize();
  const bool packed = std::all_of(views.begin(), views.end(), [](const Linear& w) {
    return w.bits == 4 && w.codebook == static_cast<int32_t>(Codebook::mcg);
  });
  table = {std::move(views), std::move(device), packed, nullptr, false};
  return table;
}

bool CudaOps::same_inputs(const ExpertTable& gate, std::span<const Weight> up, int64_t in) {
  ExpertTable& table = experts_.at(up.data());
  if (table.inputs_as == gate.host.front().suh) return table.same_inputs;
  if (capturing_) throw Error(Code::internal, "moe: a graph is captured before its experts were used once");
  const auto bytes = static_cast<size_t>(in) * sizeof(uint16_t);
  std::vector<std::byte> mine(bytes), other(bytes);
  bool same = true;
  for (size_t e = 0; same && e < table.host.size(); ++e) {
    const void *a = gate.host[e].suh, *b = table.host[e].suh;
    if (a == b) continue;
    check(cudaMemcpyAsync(mine.data(), a, bytes, cudaMemcpyDefault, stream()), "read input scales");
    check(cudaMemcpyAsync(other.data(), b, bytes, cudaMemcpyDefault, stream()), "read input scales");
    synchronize();
    same = mine == other;
  }
  table.inputs_as = gate.host.front().suh;
  table.same_inputs = same;
  return same;
}

const Linear* CudaOps::experts(std::span<const Weight> all, std::string_view argument, int64_t out, int64_t in) {
  return reinterpret_cast<const Linear*>(expert_table(all, argument, out, in).device.data());
}

void CudaOps::moe(const MoeArgs& args) {
  const std::string_view op = "moe";
  const Matrix x = matrix(op, "x", args.x, {-1, -1});
  const int64_t rows = x.rows, hidden = x.columns, k = args.index.dim(1);
  const Matrix out = matrix(op, "out", args.out, {rows, hidden});
  expect(op, "index", args.index, Dtype::i32, {rows, -1});
  const Matrix weight = matrix(op, "weight", args.weight, {rows, k});
  expect_that(args.gate.size() == args.up.size() && args.gate.size() == args.down.size() && !args.gate.empty(), op,
              "gate, up and down must have one weight an expert");
  if (rows == 0 || moe_packed(args)) return;
  const int64_t inter = args.gate.front().out, total = rows * k;
  const auto* index = static_cast<const int32_t*>(args.index.data);
  const auto items = [&](const Linear* linears) { return Items{index, args.index.stride[0], k, linears, {}}; };
  const Items gate_items = items(experts(args.gate, "gate", inter, hidden));
  const Items up_items = items(experts(args.up, "up", inter, hidden));
  const Items down_items = items(experts(args.down, "down", hidden, inter));
  auto* prepared = scratch<float>(Area::rotated, static_cast<size_t>(total * std::max(hidden, inter)));
  auto* gate = scratch<float>(Area::gate, static_cast<size_t>(total * inter));
  auto* up = scratch<float>(Area::up, static_cast<size_t>(total * inter));
  auto* down = scratch<float>(Area::pairs, static_cast<size_t>(total * hidden));
  const cudaStream_t on = stream();
  const auto all = static_cast<unsigned>(total);
  constexpr unsigned kWide = kBlock * kDepthGroups;
  prepare_inputs<<<dim3(all, parts(hidden, kBlock)), kBlock, 0, on>>>(gate_items, x, k, prepared, hidden);
  project<<<dim3(all, parts(inter, kBlock)), kWide, 0, on>>>(gate_items, prepared, hidden, gate, inter);
  prepare_inputs<<<dim3(all, parts(hidden, kBlock)), kBlock, 0, on>>>(up_items, x, k, prepared, hidden);
  project<<<dim3(all, parts(inter, kBlock)), kWide, 0, on>>>(up_items, prepared, hidden, up, inter);
  check(cudaGetLastError(), op);
  activate<<<parts(total * inter, 256), 256, 0, on>>>(gate, up, total * inter, args.limit);
  const Matrix activated{gate, inter, total, inter, false};
  prepare_inputs<<<dim3(all, parts(inter, kBlock)), kBlock, 0, on>>>(down_items, activated, 1, prepared, inter);
  project<<<dim3(all, parts(hidden, kBlock)), kWide, 0, on>>>(down_items, prepared, inter, down, hidden);
  check(cudaGetLastError(), op);
  combine<<<dim3(static_cast<unsigned>(rows), parts(hidden, 256)), 256, 0, on>>>(index, args.index.stride[0], weight, k,
                                                                                 down, out);
  check(cudaGetLastError(), op);
}

}  // namespace glm53::cuda
