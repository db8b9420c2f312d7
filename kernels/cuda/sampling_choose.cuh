// The end of sampling: one block a row sorts what may be chosen and chooses.
#pragma once

#include "kernels/cuda/sampling.cuh"

namespace glm53::cuda::sampling {

/// Descending value as ascending bits, then the id.
__device__ inline uint64_t sort_key(Item item) {
  const uint32_t bits = __float_as_uint(item.z == 0 ? 0.0F : item.z);
  const uint32_t ascending = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(item.id);
}
__device__ inline Item item_of(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  const uint32_t bits = (ascending & 0x80000000U) != 0 ? ascending & 0x7fffffffU : ~ascending;
  return {__uint_as_float(bits), static_cast<int32_t>(static_cast<uint32_t>(key))};
}

__device__ inline void sort_list(uint64_t* keys, unsigned n) {
  for (unsigned size = 2; size <= n; size *= 2) {
    for (unsigned step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (unsigned i = threadIdx.x; i < n / 2; i += kChooseThreads) {
        const unsigned low = 2 * i - (i & (step - 1)), high = low + step;
        const bool up = (low & size) == 0;
        const uint64_t a = keys[low], b = keys[high];
        if ((a > b) == up) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

/// The first i < n for which `holds`, or n.
template <class F>
__device__ inline int first_where(int n, int* room, F holds) {
  __syncthreads();
  if (threadIdx.x == 0) *room = n;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kChooseThreads)
    if (holds(i)) {
      atomicMin(room, i);
      break;
    }
  __syncthreads();
  return *room;
}

/// sums[i] = the first i + 1 of `n` values, at most kRoom.
template <class T, class Value>
__device__ inline void running_sums(T* sums, int n, T* room, Value value) {
  constexpr int kEach = kRoom / kChooseThreads;
  const int first = static_cast<int>(threadIdx.x) * kEach;
  T mine[kEach], total = 0;
  for (int i = 0; i < kEach; ++i) mine[i] = total += first + i < n ? value(first + i) : T{0};
  T before = total;
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(0xffffffffU, before, d);
    if ((threadIdx.x & 31U) >= static_cast<unsigned>(d)) before += other;
  }
  __syncthreads();
  if ((threadIdx.x & 31U) == 31U) room[threadIdx.x >> 5] = before;
  __syncthreads();
  T warps = 0;
  for (unsigned w = 0; w < threadIdx.x >> 5; ++w) warps += room[w];
  before = warps + (before - total);
  for (int i = 0; i < kEach; ++i)
    if (first + i < n) sums[first + i] = before + mine[i];
  __syncthreads();
}

__device__ inline double log_sum_of(const Job& job, int64_t r) {
  double total = 0;
  for (int b = 0; b < job.blocks; ++b) total += static_cast<double>(job.parts[r * job.blocks + b].raw_sum);
  return static_cast<double>(raw_max_of(job, r)) + log(total);
}

/// The token of a sorted list, or -1 when it lies behind it.
__device__ inline int32_t draw(const Job& job, const RowSettings& row, int64_t r, const View<false>& view,
                               const uint64_t* keys, double* sums, double* room, int* place, Cut cut) {
  const int n = static_cast<int>(cut.items);
  running_sums(sums, n, room, [&](int i) { return static_cast<double>(view.p(item_of(keys[i]).z)); });
  double mass = 0;
  for (int b = 0; b < job.blocks; ++b) mass += job.parts[r * job.blocks + b].mass;
  int limit = n;
  bool whole = cut.items == cut.all;  // nothing that may be chosen lies behind the list
  if (row.top_k > 0 && static_cast<uint32_t>(row.top_k) < cut.all) {
    if (row.top_k > n) return -1;
    const float least = item_of(keys[row.top_k - 1]).z;  // ties share a bin, so the list holds them all
    limit = first_where(n, place, [&](int i) { return item_of(keys[i]).z < least; });
    mass = sums[limit - 1];
    whole = true;
  }
  if (row.top_p < 1) {
    const double wanted = static_cast<double>(row.top_p) * mass;
    const int at = first_where(limit, place, [&](int i) { return sums[i] >= wanted; });
    if (at == limit && !whole) return -1;
    limit = min(at + 1, limit);
    mass = sums[limit - 1];
    whole = true;
  }
  const double target = (row.u >= 0 ? row.u : 0.0) * mass;
  const int at = first_where(limit, place, [&](int i) { return sums[i] > target; });
  if (at == limit && !whole) return -1;
  return item_of(keys[min(at, limit - 1)]).id;
}

/// The choice of a row where it does not lie in the first bins: by the bins' running counts and masses, and one bin at
/// a time in order.
class FarDraw {
 public:
  /// What is kept: the bins before `bin` and the first `items` of that one.
  struct Kept {
    int bin, items;
    uint64_t mass;
  };
  /// Shared memory: `keys` and `sums` of kRoom each (the sorted bin and its running masses), `room` of a value a warp.
  __device__ FarDraw(uint64_t* keys_at, uint64_t* sums_at, uint64_t* room_at, int* place_at)
      : keys(keys_at), sums(sums_at), room(room_at), place(place_at) {}

  /// -1 when a bin is too full.
  __device__ int32_t run(const Job& job, const RowSettings& row, int64_t r) {
    const View<false> view(job, row, r);
    const uint32_t* counts = job.bins + 2 * r * kBins;
    const unsigned long long* masses = job.masses + r * kBins;
    const uint64_t all = before(counts, kBins);
    Kept kept{kBins, 0, before(masses, kBins)};
    if (row.top_k > 0 && static_cast<uint64_t>(row.top_k) < all) {
      const auto wanted = static_cast<uint64_t>(row.top_k);
      const int bin = bin_where(counts, [=](uint64_t sum) { return sum >= wanted; });
      if (!load(job, view, r, bin)) return -1;
      const float least = item_of(keys[wanted - before(counts, bin) - 1]).z;
      const int items = first_where(loaded_, place, [&](int i) { return item_of(keys[i]).z < least; });
      kept = {bin, items, before(masses, bin) + sums[items - 1]};
    }
    if (row.top_p < 1) {
      const double wanted = static_cast<double>(row.top_p) * static_cast<double>(kept.mass);
      if (!cut(job, view, r, masses, kept, [=](uint64_t sum) { return static_cast<double>(sum) >= wanted; })) return -1;
    }
    const double target = (row.u >= 0 ? row.u : 0.0) * static_cast<double>(kept.mass);
    if (!cut(job, view, r, masses, kept, [=](uint64_t sum) { return static_cast<double>(sum) > target; })) return -1;
    return item_of(keys[kept.items - 1]).id;
  }

 private:
  /// Sum of the bins before `end`.
  template <class T>
  __device__ uint64_t before(const T* bins, int end) {
    uint64_t sum = 0;
    for (int b = static_cast<int>(threadIdx.x); b < end; b += kChooseThreads) sum += bins[b];
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffU, sum, d);
    __syncthreads();
    if ((threadIdx.x & 31U) == 0) room[threadIdx.x >> 5] = sum;
    __syncthreads();
    uint64_t total = 0;
    for (int w = 0; w < kChooseThreads / 32; ++w) total += room[w];
    __syncthreads();
    return total;
  }
  /// The first bin up to whose end the sum holds; the last bin with anything when there is none.
  template <class T, class F>
  __device__ int bin_where(const T* bins, F holds) {
    loaded_bin_ = -1;  // keys and sums are used for it
    running_sums(sums, kBins, room, [&](int i) { return static_cast<uint64_t>(bins[i]); });
    const int bin = first_where(kBins, place, holds_at(holds));
    if (bin < kBins) return bin;
    const uint64_t all = sums[kBins - 1];
    return first_where(kBins, place, [&](int i) { return sums[i] == all; });
  }
  template <class F>
  __device__ auto holds_at(F holds) {
    return [this, holds](int i) { return holds(sums[i]); };
  }
  /// Shortens what is kept to the first item up to whose end the mass holds; at least to what there is.
  template <class F>
  __device__ bool cut(const Job& job, const View<false>& view, int64_t r, const unsigned long long* masses, Kept& kept,
                      F holds) {
    const int bin = min(bin_where(masses, holds), kept.bin);
    if (!load(job, view, r, bin)) return false;
    const uint64_t base = before(masses, bin);
    const int limit = bin == kept.bin ? kept.items : loaded_;
    const int at = first_where(limit, place, [&](int i) { return holds(base + sums[i]); });
    kept.bin = bin;
    kept.items = min(at + 1, limit);
    kept.mass = base + sums[kept.items - 1];
    return true;
  }
  /// Sorts a bin, with its running masses.
  __device__ bool load(const Job& job, const View<false>& view, int64_t r, int bin) {
    if (bin == loaded_bin_) return loaded_ > 0;
    __syncthreads();
    if (threadIdx.x == 0) *place = 0;
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < job.vocab; i += kChooseThreads) {
      const float z = view.v[i];
      if (!view.kept(z) || view.bin(z) != bin) continue;
      const int at = atomicAdd(place, 1);
      if (at < kRoom) keys[at] = sort_key({z, i});
    }
    __syncthreads();
    loaded_ = *place;
    loaded_bin_ = bin;
    if (loaded_ == 0 || loaded_ > kRoom) return false;
    int padded = 32;
    while (padded < loaded_) padded *= 2;
    for (int i = loaded_ + static_cast<int>(threadIdx.x); i < padded; i += kChooseThreads) keys[i] = ~uint64_t{0};
    sort_list(keys, static_cast<unsigned>(padded));
    running_sums(sums, loaded_, room, [&](int i) { return units_of(view.p(item_of(keys[i]).z)); });
    return true;
  }

  uint64_t *keys, *sums, *room;
  int* place;
  int loaded_bin_ = -1, loaded_ = 0;
};

template <bool Raw>
__global__ void __launch_bounds__(kChooseThreads) choose_rows(Job job) {
  extern __shared__ uint64_t memory[];
  uint64_t* keys = memory;
  auto* sums = reinterpret_cast<double*>(keys + kRoom);
  __shared__ double room[kChooseThreads / 32];
  __shared__ uint32_t counts[kThreads];
  __shared__ int place;
  const int64_t r = blockIdx.x;
  const RowSettings row = job.rows[r];
  Choice& choice = job.choice[r];
  const Item best = best_of(job, r);
  if constexpr (Raw) {
    if (threadIdx.x == 0) choice.on_host = choice.top_n = 0;
  } else if (threadIdx.x == 0) {
    choice.token = best.z > never() ? best.id : -1;
    choice.logprob = never();
  }
  const bool nothing = Raw ? !(raw_max_of(job, r) > never()) : !(best.z > never());
  if (View<Raw>::wanted(row) && !nothing) {
    const Cut cut = cut_of(job.bins + (2 * r + Raw) * kBins, counts);
    unsigned padded = 32;
    while (padded < cut.items) padded *= 2;
    for (unsigned i = threadIdx.x; i < padded; i += kChooseThreads)
      keys[i] = i < cut.items ? sort_key(job.list[r * kList + i]) : ~uint64_t{0};
    sort_list(keys, padded);
    if constexpr (Raw) {
      const int wanted = min(row.top, static_cast<int>(min(cut.all, static_cast<uint32_t>(kMostTop))));
      if (threadIdx.x == 0) choice.on_host = wanted > static_cast<int>(cut.items) ? 1 : 0;
      if (threadIdx.x == 0) choice.top_n = wanted;
      const double log_sum = log_sum_of(job, r);
      if (static_cast<int>(threadIdx.x) < wanted && wanted <= static_cast<int>(cut.items)) {
        const Item item = item_of(keys[threadIdx.x]);
        choice.top_id[threadIdx.x] = item.id;
        choice.top_logprob[threadIdx.x] = static_cast<float>(static_cast<double>(item.z) - log_sum);
      }
    } else {
      const View<false> view(job, row, r);
      int32_t token = cut.items == 0 ? -1 : draw(job, row, r, view, keys, sums, room, &place, cut);
      if (token < 0) {
        FarDraw far(keys, reinterpret_cast<uint64_t*>(sums), reinterpret_cast<uint64_t*>(room), &place);
        token = far.run(job, row, r);
      }
      if (threadIdx.x == 0) {
        choice.token = token;
        if (token < 0) choice.on_host = 1;
      }
    }
  }
  if constexpr (!Raw) {
    if (threadIdx.x == 0 && choice.token >= 0)
      choice.logprob =
          static_cast<float>(static_cast<double>(job.logits[r * job.stride + choice.token]) - log_sum_of(job, r));
  }
}

}  // namespace glm53::cuda::sampling
