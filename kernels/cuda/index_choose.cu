// The exact choice of pools: the `top` best scores, ties to the lower pool, by radix selection on keys that all differ
// (score above, pool below). One block a row; or, for few rows over a long context, many blocks a row: the scoring has
// counted first digits, each block of the choice looks at a slice, and the block that is last puts the row together.
#include "kernels/cuda/index_select.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/runtime.h"

namespace glm53::cuda {
namespace {

constexpr unsigned kThreads = 1024;
constexpr int kSlice = 4096;  // pools of a block that shares a row
constexpr int kFew = 1024;    // keys ranked against one another

/// Where the digits of a key begin, from the top: three of the score, three of the pool.
__device__ constexpr int shift_of(int digit) {
  return digit < 3 ? (digit == 0 ? 53 : digit == 1 ? 42 : 32) : (digit == 3 ? 21 : digit == 4 ? 10 : 0);
}

__device__ uint64_t sort_key(float score, int64_t pool) {
  return static_cast<uint64_t>(ordered(score)) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(pool));
}

/// Sum of `mine` over the threads before this one; *warps holds 32 values. Every thread (kThreads) calls it.
__device__ int sum_before(int mine, int* warps) {
  const int t = static_cast<int>(threadIdx.x), lane = t & 31, warp = t >> 5;
  int sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffU, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  const int before = lane < warp ? warps[lane] : 0;
  return sum - mine + __reduce_add_sync(0xffffffffU, before);
}

struct Found {
  int bin, left;  ///< the deciding digit, and how many keys of it are wanted
};

/// The highest bin from which on, downwards, at least `left` keys lie. Every thread calls it; each has two bins, from
/// the top down.
__device__ Found find_bin(const int* histogram, int left, int* warps, Found* found) {
  const int high = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
  const int2 two = *reinterpret_cast<const int2*>(histogram + high - 1);
  const int first = two.y, both = two.x + two.y, before = sum_before(both, warps);
  if (before < left && before + both >= left) {
    const bool upper = before + first >= left;
    *found = {upper ? high : high - 1, left - before - (upper ? 0 : first)};
  }
  __syncthreads();
  const Found result = *found;
  __syncthreads();
  return result;
}

struct Room {
  int histogram[kBins], warps[32];
  Found found;
};

/// The wanted-th largest of n keys that start with `prefix` above digit `digit`.
template <class Key>
__device__ uint64_t threshold(const Key& key, int64_t n, int wanted, uint64_t prefix, int digit, Room& room) {
  int above = digit == 0 ? 64 : shift_of(digit - 1);
  for (; digit < 6; ++digit) {
    const int shift = shift_of(digit);
    for (unsigned i = threadIdx.x; i < kBins; i += kThreads) room.histogram[i] = 0;
    __syncthreads();
    const uint64_t mask = (uint64_t{1} << (above - shift)) - 1;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const uint64_t k = key(i);
      if (above == 64 || k >> above == prefix >> above) atomicAdd(&room.histogram[k >> shift & mask], 1);
    }
    __syncthreads();
    const Found found = find_bin(room.histogram, wanted, room.warps, &room.found);
    prefix |= static_cast<uint64_t>(found.bin) << shift;
    wanted = found.left;
    if (wanted == room.histogram[found.bin]) return prefix;  // all of the bin: its smallest key will do
    above = shift;
    __syncthreads();
  }
  return prefix;
}

/// Scores that were asked for, the count, and rows that need no choice; true when the row is done.
__device__ bool trivial(const Rows& b, const Select& a, int64_t row, int64_t n, const float* scores, unsigned part,
                        unsigned parts) {
  if (a.shown.data != nullptr) {
    const float none = padding_row(b, row) ? 0.0F : -INFINITY;
    for (int64_t p = int64_t{part} * kThreads + threadIdx.x; p < a.shown.columns; p += int64_t{parts} * kThreads) {
      put(a.shown, row, p, p < n ? scores[p] : none);
    }
  }
  if (part == 0 && threadIdx.x == 0) a.count[row] = static_cast<int32_t>(min(n, a.top));
  if (n > a.top) return false;
  if (part == 0) {
    int32_t* selected = a.selected + row * a.selected_stride;
    for (int64_t p = threadIdx.x; p < a.top; p += kThreads) selected[p] = p < n ? static_cast<int32_t>(p) : -1;
  }
  return true;
}

/// One block a row.
__global__ void __launch_bounds__(kThreads) choose(Rows b, LatentView c, Select a) {
  __shared__ __align__(16) Room room;
  __shared__ int before[32];
  after_previous();
  const int64_t row = a.first_row + blockIdx.x, n = candidates(b, c, a, row);
  const float* scores = a.scores + blockIdx.x * a.most;
  if (trivial(b, a, row, n, scores, 0, 1)) return;
  int32_t* selected = a.selected + row * a.selected_stride;
  const auto key = [&](int64_t p) { return sort_key(scores[p], p); };
  const uint64_t least = threshold(key, n, static_cast<int>(a.top), 0, 0, room);
  const unsigned lane = threadIdx.x & 31U, warp = threadIdx.x >> 5;
  int done = 0;
  for (int64_t first = 0; first < n; first += kThreads) {  // ascending pools
    const int64_t p = first + threadIdx.x;
    const bool in = p < n && key(p) >= least;
    const unsigned mask = __ballot_sync(0xffffffffU, in);
    if (lane == 0) before[warp] = __popc(mask);
    __syncthreads();
    const int mine = before[lane];
    const int offset = done + __reduce_add_sync(0xffffffffU, lane < warp ? mine : 0);
    done += __reduce_add_sync(0xffffffffU, mine);
    if (in) selected[offset + __popc(mask & ((1U << lane) - 1U))] = static_cast<int32_t>(p);
    __syncthreads();
  }
}

/// Appends to a list those threads' values that want it; a warp reserves its places together.
__device__ void append(int* list, int* count, bool want, int value) {
  const unsigned mask = __ballot_sync(0xffffffffU, want), lane = threadIdx.x & 31U;
  if (mask == 0) return;
  int start = 0;
  if (lane == 0) start = atomicAdd(count, __popc(mask));
  start = __shfl_sync(0xffffffffU, start, 0);
  if (want) list[start + __popc(mask & ((1U << lane) - 1U))] = value;
}

/// What the last block of a row keeps.
struct Last {
  int chosen[kMaxSharedTop], sorted[kMaxSharedTop], starts[kThreads], n_chosen, n_few;
  uint64_t few[kFew], least;
};

/// The chosen pools in ascending order: by buckets of neighbouring pools, inside one by comparison.
__device__ void write_sorted(Last& last, int32_t* selected, int top, int64_t n, int* warps) {
  int shift = 0;
  while ((n - 1) >> shift >= kThreads) ++shift;
  last.starts[threadIdx.x] = 0;
  __syncthreads();
  const int t = static_cast<int>(threadIdx.x), pool = t < top ? last.chosen[t] : 0, bucket = pool >> shift;
  int place = 0;
  if (t < top) place = atomicAdd(&last.starts[bucket], 1);
  __syncthreads();
  const int size = last.starts[t], start = sum_before(size, warps);
  __syncthreads();
  last.starts[t] = start;
  __syncthreads();
  if (t < top) last.sorted[last.starts[bucket] + place] = pool;
  __syncthreads();
  if (t < top) {
    const int begin = last.starts[bucket],
              end = bucket + 1 < static_cast<int>(kThreads) ? last.starts[bucket + 1] : top;
    int rank = begin;
    for (int i = begin; i < end; ++i) rank += last.sorted[i] < pool ? 1 : 0;
    selected[rank] = pool;
  }
}

/// Takes the `left` best of the m pools in `maybe` into the chosen ones. All share the first digit.
__device__ void take_best(const float* scores, const int* maybe, const int* second, int m, Found first, Room& room,
                          Last& last) {
  const auto key = [&](int64_t i) { return sort_key(scores[maybe[i]], maybe[i]); };
  const int rounded = (m + 31) / 32 * 32;
  uint64_t least = 0;
  if (first.left < m) {
    const Found found = find_bin(second, first.left, room.warps, &room.found);
    const uint64_t prefix = static_cast<uint64_t>(first.bin) << shift_of(0) | static_cast<uint64_t>(found.bin)
                                                                                  << shift_of(1);
    const int same = second[found.bin];
    if (found.left == same) {
      least = prefix;
    } else if (same > kFew) {
      least = threshold(key, m, found.left, prefix, 2, room);
    } else {  // rank the few against one another
      for (int i = static_cast<int>(threadIdx.x); i < m; i += static_cast<int>(kThreads)) {
        const uint64_t k = key(i);
        if (k >> shift_of(1) == prefix >> shift_of(1)) last.few[atomicAdd(&last.n_few, 1)] = k;
      }
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < same; i += static_cast<int>(kThreads)) {
        int rank = 0;
        for (int j = 0; j < same; ++j) rank += last.few[j] > last.few[i] ? 1 : 0;
        if (rank == found.left - 1) last.least = last.few[i];
      }
      __syncthreads();
      least = last.least;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < rounded; i += static_cast<int>(kThreads)) {
    const bool want = i < m && (least == 0 || key(i) >= least);
    append(last.chosen, &last.n_chosen, want, i < m ? maybe[i] : 0);
  }
}

/// Block (slice of pools, row).
__global__ void __launch_bounds__(kThreads) choose_shared(Rows b, LatentView c, Select a) {
  __shared__ __align__(16) Room room;
  __shared__ Last last;
  __shared__ bool is_last;
  after_previous();
  const int64_t row = a.first_row + blockIdx.y, n = candidates(b, c, a, row), begin = int64_t{blockIdx.x} * kSlice;
  const float* scores = a.scores + blockIdx.y * a.most;
  if (trivial(b, a, row, n, scores, blockIdx.x, gridDim.x) || begin >= n) return;
  int* const words = a.choices + blockIdx.y * choice_words(a);
  int *const counts = words + kCounts, *const sure = words + kLists, *const maybe = sure + a.top;
  const Found first = find_bin(words + kFirstDigits, static_cast<int>(a.top), room.warps, &room.found);
  for (unsigned i = threadIdx.x; i < kBins; i += kThreads) room.histogram[i] = 0;
  __syncthreads();
  float mine[kSlice / kThreads];
#pragma unroll
  for (int i = 0; i < kSlice / static_cast<int>(kThreads); ++i) {
    const int64_t p = begin + i * kThreads + threadIdx.x;
    mine[i] = p < n ? scores[p] : 0.0F;
  }
#pragma unroll
  for (int i = 0; i < kSlice / static_cast<int>(kThreads); ++i) {
    const int64_t p = begin + i * kThreads + threadIdx.x;
    const uint32_t value = ordered(mine[i]);
    const int digit = static_cast<int>(value >> 21);
    append(sure, &counts[kSure], p < n && digit > first.bin, static_cast<int>(p));
    const bool same = p < n && digit == first.bin;
    append(maybe, &counts[kMaybe], same, static_cast<int>(p));
    if (same) atomicAdd(&room.histogram[value >> 10 & (kBins - 1)], 1);
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < kBins; i += kThreads) {
    if (room.histogram[i] != 0) atomicAdd(&words[kSecondDigits + i], room.histogram[i]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&counts[kDone], 1) == static_cast<int>((n + kSlice - 1) / kSlice) - 1;
    last.n_chosen = static_cast<int>(a.top) - first.left;
    last.n_few = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const int sures = static_cast<int>(a.top) - first.left;
  for (int i = static_cast<int>(threadIdx.x); i < sures; i += static_cast<int>(kThreads))
    last.chosen[i] = __ldcg(sure + i);
  take_best(scores, maybe, words + kSecondDigits, __ldcg(counts + kMaybe), first, room, last);
  __syncthreads();
  write_sorted(last, a.selected + row * a.selected_stride, static_cast<int>(a.top), n, room.warps);
}

}  // namespace

int* clear_choices(const Select& a, unsigned rows, int64_t tile, cudaStream_t on) {
  int* const choices = reinterpret_cast<int*>(a.scores + tile * a.most);
  const auto pitch = static_cast<size_t>(choice_words(a)) * sizeof(int);
  check(cudaMemset2DAsync(choices, pitch, 0, kLists * sizeof(int), rows, on), "index_select");
  return choices;
}

void choose_pools(const Rows& b, const LatentView& c, const Select& a, unsigned rows, bool shared, cudaStream_t on) {
  if (shared) {
    launch_next(choose_shared, dim3(static_cast<unsigned>((a.most + kSlice - 1) / kSlice), rows), dim3(kThreads), on, b,
                c, a);
  } else {
    launch_next(choose, dim3(rows), dim3(kThreads), on, b, c, a);
  }
}

}  // namespace glm53::cuda
