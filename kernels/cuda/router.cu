// Router (spec model §6), fp32 throughout.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"

namespace glm53::cuda {
namespace {

struct Route {
  Matrix logits, weight;
  Plain bias;
  int32_t* index;
  int64_t index_stride, real_rows;
  int32_t experts, groups, top_groups, k;
  bool normalize;
  float scale;
};

/// Place of the best value not yet taken, the same in all lanes; ties go to the lower index, NaN counts as −∞.
__device__ int best_free(const float* value, const uint8_t* taken, int n) {
  float best = -INFINITY;
  int place = n;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) {
    if (taken[i] != 0) continue;
    const float v = isnan(value[i]) ? -INFINITY : value[i];
    if (place == n || v > best) {
      best = v;
      place = i;
    }
  }
  for (int d = 16; d > 0; d >>= 1) {
    const float v = __shfl_xor_sync(0xffffffffU, best, d);
    const int other = __shfl_xor_sync(0xffffffffU, place, d);
    if (other < n && (place == n || v > best || (v == best && other < place))) {
      best = v;
      place = other;
    }
  }
  return place;
}

/// Sum of the two largest values (of the only one where there is one).
__device__ float group_score(const float* b, int n) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < n; ++i) {
    if (b[i] > first) {
      second = first;
      first = b[i];
    } else if (b[i] > second) {
      second = b[i];
    }
  }
  return n == 1 ? first : first + second;
}

/// One warp a row; shared: s, b, scores of groups [experts] each, then taken.
__global__ void route(Route a) {
  extern __shared__ float memory[];
  const int n = a.experts, lane = static_cast<int>(threadIdx.x);
  float *s = memory, *b = s + n, *score = b + n;
  auto* taken = reinterpret_cast<uint8_t*>(score + n);
  const int64_t row = blockIdx.x;
  int32_t* index = a.index + row * a.index_stride;
  if (row >= a.real_rows) {
    for (int i = lane; i < a.k; i += 32) {
      index[i] = -1;
      put(a.weight, row, i, 0.0F);
    }
    return;
  }
  for (int e = lane; e < n; e += 32) {
    s[e] = sigmoid(at(a.logits, row, e));
    b[e] = s[e] + at(a.bias, e);
    taken[e] = 0;
  }
  __syncwarp();
  if (a.groups > 1) {  // all experts outside the best groups become −∞ (not 0: a biased score may be negative)
    const int size = n / a.groups;
    for (int g = lane; g < a.groups; g += 32) score[g] = group_score(b + g * size, size);
    __syncwarp();
    for (int i = 0; i < a.top_groups; ++i) {
      const int g = best_free(score, taken, a.groups);
      if (lane == 0) taken[g] = 1;
      __syncwarp();
    }
    for (int e = lane; e < n; e += 32) {
      if (taken[e / size] == 0) b[e] = -INFINITY;
    }
    __syncwarp();
    for (int g = lane; g < a.groups; g += 32) taken[g] = 0;
    __syncwarp();
  }
  for (int i = 0; i < a.k; ++i) {
    const int e = best_free(b, taken, n);
    if (lane == 0) taken[e] = 1;
    __syncwarp();
  }
  if (lane != 0) return;
  int chosen = 0;
  float total = 0;
  for (int e = 0; e < n; ++e) {
    if (taken[e] == 0) continue;
    index[chosen++] = e;
    total += s[e];
  }
  for (int i = 0; i < a.k; ++i) {
    const float w = a.normalize ? s[index[i]] / (total + 1e-20F) : s[index[i]];
    put(a.weight, row, i, w * a.scale);
  }
}

constexpr int kMaxExperts = 1024;  // of route_flat: a thread each
constexpr int64_t kFewRows = 64;   // more rows fill the card with a warp each

/// The same for one group: a block a row, every expert finds its rank among the others.
__global__ void __launch_bounds__(kMaxExperts) route_flat(Route a) {
  __shared__ __align__(16) float b[kMaxExperts];
  __shared__ float s[kMaxExperts];
  __shared__ int chosen[kMaxExperts], counts[32];
  const int n = a.experts, e = static_cast<int>(threadIdx.x), lane = e & 31, warp = e >> 5;
  const float bias = e < n ? at(a.bias, e) : 0.0F;
  after_previous();
  const int64_t row = blockIdx.x;
  int32_t* index = a.index + row * a.index_stride;
  if (row >= a.real_rows) {
    for (int i = e; i < a.k; i += static_cast<int>(blockDim.x)) {
      index[i] = -1;
      put(a.weight, row, i, 0.0F);
    }
    return;
  }
  float mine = -INFINITY;
  if (e < n) {
    s[e] = sigmoid(at(a.logits, row, e));
    const float v = s[e] + bias;
    mine = isnan(v) ? -INFINITY : v;
  }
  b[e] = mine;
  __syncthreads();
  int rank = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x); i += 4) {  // whole warps: values past n are −∞ and come last
    const float4 v = *reinterpret_cast<const float4*>(&b[i]);
    rank += v.x > mine || (v.x == mine && i < e) ? 1 : 0;
    rank += v.y > mine || (v.y == mine && i + 1 < e) ? 1 : 0;
    rank += v.z > mine || (v.z == mine && i + 2 < e) ? 1 : 0;
    rank += v.w > mine || (v.w == mine && i + 3 < e) ? 1 : 0;
  }
  const bool in = e < n && rank < a.k;
  const unsigned mask = __ballot_sync(0xffffffffU, in);
  if (lane == 0) counts[warp] = __popc(mask);
  __syncthreads();
  int place = __popc(mask & ((1U << lane) - 1U));
  for (int w = 0; w < warp; ++w) place += counts[w];
  if (in) chosen[place] = e;
  __syncthreads();
  if (warp != 0) return;
  float total = 0;
  for (int i = 0; i < a.k; ++i) total += s[chosen[i]];  // in ascending order
  for (int i = lane; i < a.k; i += 32) {
    const float w = a.normalize ? s[chosen[i]] / (total + 1e-20F) : s[chosen[i]];
    index[i] = chosen[i];
    put(a.weight, row, i, w * a.scale);
  }
}

}  // namespace

void CudaOps::router(const RouterArgs& args) {
  const std::string_view op = "router";
  const Matrix x = matrix(op, "x", args.x, {-1, -1});
  const int64_t rows = x.rows, experts = args.w->out;
  const Plain w = plain(op, "w", *args.w, experts, x.columns);
  expect_that(args.k >= 1 && args.k <= experts, op, "k must be 1 … experts");
  expect_that(
      args.groups <= 1 || (experts % args.groups == 0 && args.top_groups >= 1 && args.top_groups <= args.groups), op,
      "groups must divide the experts, top_groups must be 1 … groups");
  expect_that(args.real_rows >= 0 && args.real_rows <= rows, op, "real_rows must be 0 … rows");
  expect(op, "index", args.index, Dtype::i32, {rows, args.k});
  Route a{};
  a.weight = matrix(op, "weight", args.weight, {rows, args.k});
  a.bias = plain(op, "bias", *args.bias, experts, 1);
  if (rows == 0) return;
  a.logits = args.logits.empty() ? Matrix{scratch<float>(Area::logits, static_cast<size_t>(rows * experts)), experts,
                                          rows, experts, false}
                                 : matrix(op, "logits", args.logits, {rows, experts});
  a.index = static_cast<int32_t*>(args.index.data);
  a.index_stride = args.index.stride[0];
  a.real_rows = args.real_rows;
  a.experts = static_cast<int32_t>(experts);
  a.groups = args.groups;
  a.top_groups = args.top_groups;
  a.k = args.k;
  a.normalize = args.normalize;
  a.scale = args.scale;
  dense(w, experts, x.columns, x, a.logits, 0, true);
  if (args.groups <= 1 && experts <= kMaxExperts && rows <= kFewRows) {
    const auto threads = static_cast<unsigned>((experts + 31) / 32 * 32);
    return launch_next(route_flat, dim3(static_cast<unsigned>(rows)), dim3(threads), stream(), a);
  }
  const size_t shared = static_cast<size_t>(experts) * (3 * sizeof(float) + 1);
  route<<<static_cast<unsigned>(rows), 32, shared, stream()>>>(a);
  check(cudaGetLastError(), op);
}

}  // namespace glm53::cuda
