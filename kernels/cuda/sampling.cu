// Sampling on the device (frontend §6), as kernels/cpu/sample.cpp defines it: masks, edits, then greedy or the inverse
// CDF of what the filters leave, in order of (value, id).
//
// A row is spread over blocks for what looks at the whole vocabulary. Its values fall into bins below the largest,
// whose counts and masses are known; the order within a bin is needed only where a limit (top_k, top_p, u) lies. The
// first bins, as many as fit a list, are gathered and sorted, and mostly the choice is there. Where it is not, the bins
// that hold a limit are sorted one after the other. A row that is flat to 1/32 of a logit over thousands of tokens is
// left to the host. Masses are integers or sums of a fixed order, and gathered ids are sorted, so the same logits give
// the same token.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/sampling_choose.cuh"

namespace glm53::cuda {
namespace {

using namespace sampling;  // the kernels below are its first half

__global__ void __launch_bounds__(kThreads) mask_rows(Job job) {
  __shared__ Item room[kThreads / 32];
  const int64_t r = blockIdx.y;
  const RowSettings row = job.rows[r];
  float *raw = job.logits + r * job.stride, *z = job.z + r * job.vocab;
  const Range range = part_of(job);
  Item best{never(), kNobody};
  for (int32_t i = range.first + static_cast<int32_t>(threadIdx.x); i < range.last; i += kThreads) {
    const float v = open_to(job, row, i) ? tame(raw[i]) : never();
    raw[i] = z[i] = v;
    if (v > best.z) best = {v, i};
  }
  best = block_best(best, room);
  if (threadIdx.x == 0) job.parts[r * job.blocks + blockIdx.x].raw_max = best.z;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < 2 * kBins; i += gridDim.x * kThreads)
    job.bins[r * 2 * kBins + i] = 0;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += gridDim.x * kThreads)
    job.masses[r * kBins + i] = 0;
  if (blockIdx.x == 0 && threadIdx.x < 2) job.count[2 * r + threadIdx.x] = 0;
}

/// Bans, bias, penalties: each id at most once a list.
__global__ void __launch_bounds__(kThreads) edit_rows(Job job) {
  const int64_t r = blockIdx.x;
  const RowSettings row = job.rows[r];
  float* z = job.z + r * job.vocab;
  const auto known = [&](int32_t id) { return id >= 0 && id < job.vocab; };
  const auto t = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = t; i < row.banned_n; i += kThreads) {
    const auto id = static_cast<int32_t>(job.extra[row.banned + i]);
    if (known(id)) z[id] = never();
  }
  __syncthreads();
  for (int32_t i = t; i < row.bias_n; i += kThreads) {
    const auto id = static_cast<int32_t>(job.extra[row.bias + 2 * i]);
    if (known(id)) z[id] = tame(z[id] + __uint_as_float(job.extra[row.bias + 2 * i + 1]));
  }
  __syncthreads();
  for (int32_t i = t; i < row.seen_n; i += kThreads) {
    const auto id = static_cast<int32_t>(job.extra[row.seen + 2 * i]);
    const auto times = static_cast<int32_t>(job.extra[row.seen + 2 * i + 1]);
    if (!known(id)) continue;
    float v = z[id];
    if (row.repetition > 0) v = v > 0 ? v / row.repetition : v * row.repetition;
    if (times > 0) v = v - row.frequency * static_cast<float>(times) - row.presence;
    z[id] = tame(v);
  }
}

__global__ void __launch_bounds__(kThreads) sum_rows(Job job) {
  __shared__ Item room[kThreads / 32];
  __shared__ double sums[kThreads / 32];
  const int64_t r = blockIdx.y;
  const float *raw = job.logits + r * job.stride, *z = job.z + r * job.vocab;
  const float top = raw_max_of(job, r);
  const Range range = part_of(job);
  float sum = 0;
  Item best{never(), kNobody};
  for (int32_t i = range.first + static_cast<int32_t>(threadIdx.x); i < range.last; i += kThreads) {
    if (top > never()) sum += expf(raw[i] - top);
    if (z[i] > best.z) best = {z[i], i};
  }
  best = block_best(best, room);
  const double total = block_sum_wide(static_cast<double>(sum), sums);
  if (threadIdx.x != 0) return;
  Part& part = job.parts[r * job.blocks + blockIdx.x];
  part.raw_sum = static_cast<float>(total);
  part.z_max = best.z;
  part.z_id = best.id;
}

template <bool Raw>
__global__ void __launch_bounds__(kThreads) weigh_rows(Job job) {
  __shared__ uint32_t bins[kBins];
  __shared__ uint32_t digits[Raw ? 1 : 3][Raw ? 1 : kBins];  // of 16 bits: a part has fewer than 2^16 ids
  __shared__ double sums[kThreads / 32];
  const int64_t r = blockIdx.y;
  const RowSettings row = job.rows[r];
  if (!View<Raw>::wanted(row)) return;
  const View<Raw> view(job, row, r);
  for (unsigned i = threadIdx.x; i < kBins; i += kThreads) {
    bins[i] = 0;
    if constexpr (!Raw) digits[0][i] = digits[1][i] = digits[2][i] = 0;
  }
  __syncthreads();
  const Range range = part_of(job);
  double mass = 0;
  for (int32_t i = range.first + static_cast<int32_t>(threadIdx.x); i < range.last; i += kThreads) {
    const float z = view.v[i];
    if (!view.kept(z)) continue;
    const int bin = view.bin(z);
    atomicAdd(&bins[bin], 1U);
    if constexpr (!Raw) {
      const float p = view.p(z);
      mass += static_cast<double>(p);
      const uint64_t units = units_of(p);
      for (int d = 0; d < 3; ++d)
        if (const auto digit = static_cast<uint32_t>(units >> (16 * d)) & (d < 2 ? 0xffffU : 0x1ffffU); digit != 0)
          atomicAdd(&digits[d][bin], digit);
    }
  }
  if constexpr (!Raw) {
    const double total = block_sum_wide(mass, sums);
    if (threadIdx.x == 0) job.parts[r * job.blocks + blockIdx.x].mass = total;
  }
  __syncthreads();
  uint32_t* all = job.bins + (2 * r + Raw) * kBins;
  for (unsigned i = threadIdx.x; i < kBins; i += kThreads) {
    if (bins[i] == 0) continue;
    atomicAdd(&all[i], bins[i]);
    if constexpr (!Raw)
      atomicAdd(&job.masses[r * kBins + i], static_cast<unsigned long long>(digits[0][i]) +
                                                (static_cast<unsigned long long>(digits[1][i]) << 16) +
                                                (static_cast<unsigned long long>(digits[2][i]) << 32));
  }
}

template <bool Raw>
__global__ void __launch_bounds__(kThreads) gather_rows(Job job) {
  __shared__ uint32_t room[kThreads];
  const int64_t r = blockIdx.y;
  const RowSettings row = job.rows[r];
  if (!View<Raw>::wanted(row)) return;
  const View<Raw> view(job, row, r);
  const Cut cut = cut_of(job.bins + (2 * r + Raw) * kBins, room);
  const Range range = part_of(job);
  for (int32_t i = range.first + static_cast<int32_t>(threadIdx.x); i < range.last; i += kThreads) {
    const float z = view.v[i];
    if (!view.kept(z) || view.bin(z) >= cut.bins) continue;
    const uint32_t at = atomicAdd(&job.count[2 * r + Raw], 1U);
    if (at < kList) job.list[r * kList + at] = {z, i};
  }
}

/// Settings and lists of all rows in one piece of memory.
class Packed {
 public:
  explicit Packed(std::span<const SampleRow> rows) {
    for (const SampleRow& row : rows) add(row);
  }
  std::vector<RowSettings> rows;
  std::vector<uint32_t> extra;
  bool draws = false, lists = false, edits = false;

 private:
  void add(const SampleRow& row) {
    RowSettings s{};
    s.u = row.u;
    s.temperature = row.temperature;
    s.top_p = row.top_p;
    s.min_p = row.min_p;
    s.presence = row.presence;
    s.frequency = row.frequency;
    s.repetition = row.repetition;
    s.top_k = row.top_k;
    s.top = std::min(std::max(row.top_logprobs, 0), kMostTop);
    s.allowed = here();
    s.allowed_words = static_cast<int32_t>(row.allowed.size());
    extra.insert(extra.end(), row.allowed.begin(), row.allowed.end());
    s.banned = here();
    s.banned_n = static_cast<int32_t>(row.banned.size());
    for (const int32_t id : row.banned) extra.push_back(static_cast<uint32_t>(id));
    s.bias = here();
    s.bias_n = static_cast<int32_t>(row.bias.size());
    for (const auto& [id, bias] : row.bias) put(id, bias);
    s.seen = here();
    s.seen_n = static_cast<int32_t>(row.seen.size());
    for (const auto& [id, times] : row.seen) put(id, times);
    draws = draws || row.temperature > 0;
    lists = lists || s.top > 0;
    edits = edits || s.banned_n + s.bias_n + s.seen_n > 0;
    rows.push_back(s);
  }
  int32_t here() const { return static_cast<int32_t>(extra.size()); }
  template <class T>
  void put(int32_t id, T value) {
    static_assert(sizeof(T) == sizeof(uint32_t));
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    extra.push_back(static_cast<uint32_t>(id));
    extra.push_back(bits);
  }
};

size_t rounded(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// Carves the job's arrays out of scratch.
class Carver {
 public:
  explicit Carver(std::byte* at) : at_(at) {}
  template <class T>
  T* take(size_t n) {
    auto* here = reinterpret_cast<T*>(at_);
    at_ += rounded(n * sizeof(T));
    return here;
  }

 private:
  std::byte* at_;
};

void launch(const Job& job, const Packed& packed, cudaStream_t on) {
  const auto rows = static_cast<unsigned>(packed.rows.size());
  const dim3 grid(static_cast<unsigned>(job.blocks), rows);
  constexpr size_t kShared = kRoom * (sizeof(uint64_t) + sizeof(double));
  mask_rows<<<grid, kThreads, 0, on>>>(job);
  if (packed.edits) edit_rows<<<rows, kThreads, 0, on>>>(job);
  sum_rows<<<grid, kThreads, 0, on>>>(job);
  if (packed.lists) {
    weigh_rows<true><<<grid, kThreads, 0, on>>>(job);
    gather_rows<true><<<grid, kThreads, 0, on>>>(job);
  }
  check(cudaFuncSetAttribute(choose_rows<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "sample");
  check(cudaFuncSetAttribute(choose_rows<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "sample");
  choose_rows<true><<<rows, kChooseThreads, kShared, on>>>(job);  // also clears the choices
  if (packed.draws) {
    weigh_rows<false><<<grid, kThreads, 0, on>>>(job);
    gather_rows<false><<<grid, kThreads, 0, on>>>(job);
  }
  choose_rows<false><<<rows, kChooseThreads, kShared, on>>>(job);
  check(cudaGetLastError(), "sample");
}

}  // namespace

void CudaOps::sample(const SampleArgs& args) {
  expect_that(!capturing_, "sample", "cannot be captured");
  expect_that(args.logits.rank == 2 && args.logits.dtype == Dtype::f32 && args.logits.stride[1] == 1, "sample",
              "logits must be f32 [L][vocab]");
  expect_that(args.logits.place != Place::host, "sample", "logits are in plain host memory");
  const size_t rows = args.rows.size();
  expect_that(static_cast<int64_t>(rows) <= args.logits.dim(0), "sample", "more rows than logits");
  expect_that(rows == args.out.size(), "sample", "rows and out must have one entry a row");
  expect_that(args.logits.dim(1) > 0 && args.logits.dim(1) < kNobody, "sample", "vocabulary too large");
  if (rows == 0) return;
  const Packed packed(args.rows);
  const auto vocab = static_cast<size_t>(args.logits.dim(1));
  Job job{};
  job.logits = args.logits.as<float>();
  job.stride = args.logits.stride[0];
  job.vocab = static_cast<int32_t>(vocab);
  job.text_vocab = std::min(args.text_vocab, job.vocab);
  job.blocks = static_cast<int32_t>(std::clamp<size_t>(vocab / 2048, 1, kMostBlocks));
  job.part = (job.vocab + job.blocks - 1) / job.blocks;
  const auto parts = rows * static_cast<size_t>(job.blocks);
  const size_t sent = rounded(rows * sizeof(RowSettings)) + rounded(packed.extra.size() * sizeof(uint32_t));
  const size_t back = rounded(rows * sizeof(Choice));
  const size_t inside = rounded(rows * vocab * sizeof(float)) + rounded(parts * sizeof(Part)) +
                        rounded(rows * 2 * kBins * sizeof(uint32_t)) + rounded(rows * kBins * sizeof(uint64_t)) +
                        rounded(rows * 2 * sizeof(uint32_t)) + rounded(rows * kList * sizeof(Item));
  Carver carve(scratch<std::byte>(Area::sampling, sent + back + inside));
  auto* settings = carve.take<RowSettings>(rows);
  auto* extra = carve.take<uint32_t>(packed.extra.size());
  job.rows = settings;
  job.extra = extra;
  job.choice = carve.take<Choice>(rows);
  job.z = carve.take<float>(rows * vocab);
  job.parts = carve.take<Part>(parts);
  job.bins = carve.take<uint32_t>(rows * 2 * kBins);
  job.masses = carve.take<unsigned long long>(rows * kBins);
  job.count = carve.take<uint32_t>(rows * 2);
  job.list = carve.take<Item>(rows * kList);

  if (sample_buffer_.bytes() < sent + back) sample_buffer_ = allocate(2 * (sent + back), Place::pinned);
  auto* here = static_cast<std::byte*>(sample_buffer_.data());
  std::memcpy(here, packed.rows.data(), rows * sizeof(RowSettings));
  if (!packed.extra.empty())
    std::memcpy(here + rounded(rows * sizeof(RowSettings)), packed.extra.data(),
                packed.extra.size() * sizeof(uint32_t));
  const cudaStream_t on = stream();
  check(cudaMemcpyAsync(settings, here, sent, cudaMemcpyHostToDevice, on), "send what to sample");
  launch(job, packed, on);
  check(cudaMemcpyAsync(here + sent, job.choice, rows * sizeof(Choice), cudaMemcpyDeviceToHost, on),
        "fetch what was sampled");
  synchronize();
  for (size_t r = 0; r < rows; ++r) {
    Choice choice{};
    std::memcpy(&choice, here + sent + r * sizeof(Choice), sizeof choice);
    if (choice.on_host != 0 || args.rows[r].top_logprobs > kMostTop) {
      sample_on_host(args, static_cast<int64_t>(r));
      continue;
    }
    SampleOut& out = args.out[r];
    out.token = choice.token;
    out.logprob = choice.logprob;
    out.top.clear();
    for (int32_t i = 0; i < choice.top_n; ++i) out.top.emplace_back(choice.top_id[i], choice.top_logprob[i]);
  }
}

/// One row, whose logits are masked already: masking again changes nothing.
void CudaOps::sample_on_host(const SampleArgs& args, int64_t row) {
  const Tensor wanted = args.logits.rows(row, row + 1);
  if (host_logits_.bytes() < wanted.bytes()) host_logits_ = allocate(wanted.bytes(), Place::pinned);
  const Tensor here = host_logits_.view(Dtype::f32, {1, args.logits.dim(1)});
  copy(here, wanted);
  synchronize();
  const auto at = static_cast<size_t>(row);
  host_->sample({.logits = here,
                 .text_vocab = args.text_vocab,
                 .rows = args.rows.subspan(at, 1),
                 .out = args.out.subspan(at, 1)});
}

}  // namespace glm53::cuda
