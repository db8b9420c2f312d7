// What the kernels of sampling share: a row's settings, what is found of it on the way, how its values fall into bins.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace glm53::cuda::sampling {

constexpr int kThreads = 512, kMostBlocks = 16;
constexpr int kBins = 2048;
constexpr float kBinsAUnit = 32;             // of a logit
constexpr int kList = 1024;                  // of the first bins
constexpr int kRoom = 4096;                  // of one bin that is sorted by itself
constexpr float kUnit = 281474976710656.0F;  // 2^48: masses as integers
constexpr int kMostTop = 20;
constexpr int kChooseThreads = 1024;
constexpr int32_t kNobody = 0x7fffffff;

/// A row's settings; lists lie in `extra`, counted in 4-byte words.
struct RowSettings {
  double u;
  float temperature, top_p, min_p, presence, frequency, repetition;
  int32_t top_k, top;
  int32_t allowed, allowed_words, banned, banned_n, bias, bias_n, seen, seen_n;
};
/// What one block found in its part of a row.
struct Part {
  double mass;           // of what the filters leave, relative to the best
  float raw_sum;         // of exp(raw - raw_max of the row)
  float raw_max, z_max;  // of the part
  int32_t z_id;
};
struct Choice {
  int32_t token, on_host, top_n;
  float logprob;
  int32_t top_id[kMostTop];
  float top_logprob[kMostTop];
};
struct Item {
  float z;
  int32_t id;
};
struct Job {
  float* logits;  // masked in place
  int64_t stride;
  int32_t vocab, text_vocab, part;  // part: ids of a block
  int32_t blocks;
  const RowSettings* rows;
  const uint32_t* extra;
  float* z;  // [L][vocab], edited
  Part* parts;
  uint32_t* bins;              // [L][2][kBins]: of z, of raw
  unsigned long long* masses;  // [L][kBins], of z
  uint32_t* count;             // [L][2]
  Item* list;                  // [L][kList]
  Choice* choice;
};

__device__ inline float never() {
  return -INFINITY;
}
__device__ inline float tame(float z) {
  return isnan(z) ? never() : fminf(z, 3.402823466e38F);
}
__device__ inline bool better(float a, int32_t a_id, float b, int32_t b_id) {
  return a != b ? a > b : a_id < b_id;
}

/// The best of the block in every thread.
__device__ inline Item block_best(Item mine, Item* room) {
  for (int d = 16; d > 0; d >>= 1) {
    const float z = __shfl_xor_sync(0xffffffffU, mine.z, d);
    const int32_t id = __shfl_xor_sync(0xffffffffU, mine.id, d);
    if (better(z, id, mine.z, mine.id)) mine = {z, id};
  }
  __syncthreads();
  if ((threadIdx.x & 31U) == 0) room[threadIdx.x >> 5] = mine;
  __syncthreads();
  Item best = room[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w)
    if (better(room[w].z, room[w].id, best.z, best.id)) best = room[w];
  return best;
}

/// Sum in double, of a fixed order, in every thread.
__device__ inline double block_sum_wide(double v, double* room) {
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xffffffffU, v, d);
  __syncthreads();
  if ((threadIdx.x & 31U) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  double total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) total += room[w];
  return total;
}

__device__ inline bool open_to(const Job& job, const RowSettings& row, int32_t id) {
  if (id >= job.text_vocab) return false;
  if (row.allowed_words == 0) return true;
  const int32_t word = id >> 5;
  return word < row.allowed_words && (job.extra[row.allowed + word] >> (id & 31) & 1U) != 0;
}

/// Ids of a block: [first, last).
struct Range {
  int32_t first, last;
};
__device__ inline Range part_of(const Job& job) {
  const int32_t first = static_cast<int32_t>(blockIdx.x) * job.part;
  return {first, min(first + job.part, job.vocab)};
}

__device__ inline float raw_max_of(const Job& job, int64_t r) {
  float best = never();
  for (int b = 0; b < job.blocks; ++b) best = fmaxf(best, job.parts[r * job.blocks + b].raw_max);
  return best;
}
__device__ inline Item best_of(const Job& job, int64_t r) {
  Item best{never(), kNobody};
  for (int b = 0; b < job.blocks; ++b) {
    const Part& p = job.parts[r * job.blocks + b];
    if (better(p.z_max, p.z_id, best.z, best.id)) best = {p.z_max, p.z_id};
  }
  return best;
}

/// A probability relative to the best one's, at most 1.
__device__ inline uint64_t units_of(float p) {
  return static_cast<uint64_t>(p * kUnit);
}

/// How a row's values are looked at: the edited ones for the choice, the raw ones for the list of the best.
template <bool Raw>
struct View {
  const float* v;
  float top, temperature, least;
  __device__ View(const Job& job, const RowSettings& row, int64_t r) {
    v = Raw ? job.logits + r * job.stride : job.z + r * job.vocab;
    top = Raw ? raw_max_of(job, r) : best_of(job, r).z;
    temperature = Raw ? 1 : fminf(row.temperature, 3.402823466e38F);
    least = Raw || isnan(row.min_p) ? 0 : fminf(row.min_p, 1.0F);
  }
  __device__ static bool wanted(const RowSettings& row) { return Raw ? row.top > 0 : row.temperature > 0; }
  __device__ float p(float z) const { return expf((z - top) / temperature); }
  __device__ bool kept(float z) const {
    if constexpr (Raw) return z > never();
    const float mine = p(z);
    return mine > 0 && mine >= least;
  }
  __device__ int bin(float z) const {
    const float at = (top - z) * kBinsAUnit;
    return at < static_cast<float>(kBins - 1) ? static_cast<int>(at) : kBins - 1;
  }
};

/// Bins that fit the list, from the first one: found by every block for itself. Sums of up to `kBins` counts.
struct Cut {
  int bins;
  uint32_t items, all;
};
__device__ inline Cut cut_of(const uint32_t* bins, uint32_t* room) {
  constexpr int kEach = kBins / kThreads;
  uint32_t mine[kEach], sum = 0;
  const auto t = static_cast<int>(threadIdx.x);
  if (t < kThreads) {
    for (int i = 0; i < kEach; ++i) mine[i] = sum += bins[t * kEach + i];
    room[t] = sum;
  }
  __syncthreads();
  for (int d = 1; d < kThreads; d *= 2) {
    const uint32_t before = t < kThreads && t >= d ? room[t - d] : 0;
    __syncthreads();
    if (t < kThreads) room[t] += before;
    __syncthreads();
  }
  const uint32_t all = room[kThreads - 1];
  __shared__ int fit;
  __shared__ uint32_t items;
  if (t == 0) {
    fit = 0;
    items = 0;
  }
  __syncthreads();
  if (t < kThreads) {
    const uint32_t before = room[t] - sum;
    int within = 0;
    uint32_t held = 0;
    for (int i = 0; i < kEach; ++i) {
      if (before + mine[i] > kList) break;
      within = i + 1;
      held = before + mine[i];
    }
    if (within > 0) {
      atomicMax(&fit, t * kEach + within);
      atomicMax(&items, held);
    }
  }
  __syncthreads();
  return {fit, items, all};
}

}  // namespace glm53::cuda::sampling
