// Memory, ordering, copies and sampling of the CUDA backend.
#include <algorithm>
#include <string>

#include "common/error.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"

namespace glm53 {

std::unique_ptr<Ops> make_cuda_ops(int device, Dtype activation) {
  return std::make_unique<cuda::CudaOps>(device, activation);
}

namespace cuda {
namespace {

constexpr unsigned kThreads = 256;

struct Strided {
  void* data;
  int64_t shape[4], stride[4];  // innermost last; missing dimensions are 1
  bool bf16;
};

__device__ int64_t offset(const Strided& s, int64_t i) {
  int64_t o = 0;
  for (int d = 3; d >= 0; --d) {
    o += i % s.shape[d] * s.stride[d];
    i /= s.shape[d];
  }
  return o;
}

template <class T>
__global__ void copy_items(Strided to, Strided from, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) static_cast<T*>(to.data)[offset(to, i)] = static_cast<const T*>(from.data)[offset(from, i)];
}
__global__ void convert_items(Strided to, Strided from, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) store(to.data, to.bf16, offset(to, i), load(from.data, from.bf16, offset(from, i)));
}
template <class T>
__global__ void zero_items(Strided to, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) static_cast<T*>(to.data)[offset(to, i)] = T{};
}
__global__ void add_items(Strided a, Strided b, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int64_t at = offset(a, i);
  store(a.data, a.bf16, at, load(a.data, a.bf16, at) + load(b.data, b.bf16, offset(b, i)));
}

Strided strided(const Tensor& t) {
  Strided s{t.data, {1, 1, 1, 1}, {0, 0, 0, 0}, t.dtype == Dtype::bf16};
  for (size_t i = 0; i < t.rank; ++i) {
    s.shape[4u - t.rank + i] = t.shape[i];
    s.stride[4u - t.rank + i] = t.stride[i];
  }
  return s;
}
unsigned blocks_for(int64_t n) {
  return static_cast<unsigned>((n + kThreads - 1) / kThreads);
}

}  // namespace

CudaOps::CudaOps(int device, Dtype activation) : device_(device), activation_(activation) {
  if (activation != Dtype::f32 && activation != Dtype::bf16) {
    throw Error(Code::config, "the CUDA backend has no activations of " + std::string(name(activation)), "bf16 or f32");
  }
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || device < 0 || device >= count) {
    static_cast<void>(cudaGetLastError());
    throw Error(Code::unavailable,
                "CUDA device " + std::to_string(device) + " is not there: " +
                    (status != cudaSuccess ? std::string(cudaGetErrorString(status))
                                           : std::to_string(count) + " devices found"),
                "use the CPU backend, or check the driver with nvidia-smi");
  }
  check(cudaSetDevice(device), "select the device");
  cudaFuncAttributes attributes{};
  if (const cudaError_t fits = cudaFuncGetAttributes(&attributes, add_items); fits != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw Error(
        Code::unavailable,
        "CUDA device " + std::to_string(device) + " cannot run this build's kernels: " + cudaGetErrorString(fits),
        "a device of compute capability 9.0 or 12.1, or a build with -DGLM53_CUDA_ARCHITECTURES=...");
  }
  stream_ = std::make_unique<Stream>();
  host_ = make_cpu_ops(1);
}

CudaOps::~CudaOps() {
  // Buffers that go next must not be in use; a lost device cannot be waited for and needs no waiting.
  static_cast<void>(cudaSetDevice(device_));
  static_cast<void>(cudaStreamSynchronize(stream_->get()));
}

cudaStream_t CudaOps::stream() {
  check(cudaSetDevice(device_), "select the device");
  return stream_->get();
}

Buffer CudaOps::allocate(size_t bytes, Place place) {
  return make_buffer(bytes, place, device_);
}

void CudaOps::reserve(const OpLimits& limits) {
  const auto size = [](int v) { return static_cast<size_t>(std::max(v, 0)); };
  const size_t rows = size(limits.rows), pairs = rows * std::max<size_t>(size(limits.top_k), 1);
  const size_t hidden = size(limits.hidden), widest = std::max(size(limits.widest), hidden);
  scratch<float>(Area::rotated, std::max(pairs * hidden, rows * widest));
  scratch<float>(Area::pairs, pairs * hidden);
  scratch<float>(Area::logits, rows * size(limits.experts));
}

void CudaOps::synchronize() {
  check(cudaStreamSynchronize(stream()), "wait for the device");
}

uint64_t CudaOps::record() {
  Ticket ticket{++last_ticket_, Event()};
  ticket.event.record(stream());
  tickets_.push_back(std::move(ticket));
  return last_ticket_;
}

bool CudaOps::done(uint64_t ticket) {
  static_cast<void>(stream());
  while (!tickets_.empty() && tickets_.front().event.done()) tickets_.erase(tickets_.begin());
  return tickets_.empty() || tickets_.front().number > ticket;
}

std::unique_ptr<Graph> CudaOps::capture(const std::function<void()>& body) {
  const cudaStream_t on = stream();
  check(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal), "begin a capture");
  capturing_ = true;
  cudaGraph_t graph = nullptr;
  try {
    body();
  } catch (...) {
    capturing_ = false;
    if (cudaStreamEndCapture(on, &graph) == cudaSuccess) static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
    throw;
  }
  capturing_ = false;
  check(cudaStreamEndCapture(on, &graph), "end a capture");
  return std::make_unique<CudaGraph>(graph, on, device_);
}

void CudaOps::copy(Tensor dst, Tensor src) {
  const auto real = [](Dtype t) { return t == Dtype::f32 || t == Dtype::bf16; };
  expect_that(dst.dtype == src.dtype || (real(dst.dtype) && real(src.dtype)), "copy",
              "dtypes differ and are not f32 and bf16");
  expect_that(dst.rank == src.rank && dst.shape == src.shape, "copy", "shapes differ");
  const int64_t n = dst.elements();
  if (n == 0) return;
  const cudaStream_t on = stream();
  if (dst.dtype == src.dtype && dst.contiguous() && src.contiguous()) {
    return check(cudaMemcpyAsync(dst.data, src.data, dst.bytes(), cudaMemcpyDefault, on), "copy");
  }
  // Plain host memory is not the device's to read: it goes through pinned memory, and the call waits.
  if (src.place == Place::host || dst.place == Place::host) {
    const Tensor& host = src.place == Place::host ? src : dst;
    expect_that(host.contiguous(), "copy", "a tensor in plain host memory is not contiguous");
    const Buffer pinned = allocate(host.bytes(), Place::pinned);
    Tensor staging = host;
    staging.data = pinned.data();
    staging.place = Place::pinned;
    if (src.place == Place::host) {
      std::copy_n(static_cast<const std::byte*>(src.data), src.bytes(), pinned.data());
      copy(dst, staging);
      return synchronize();
    }
    copy(staging, src);
    synchronize();
    std::copy_n(pinned.data(), dst.bytes(), static_cast<std::byte*>(dst.data));
    return;
  }
  const Strided to = strided(dst), from = strided(src);
  if (dst.dtype != src.dtype) {
    convert_items<<<blocks_for(n), kThreads, 0, on>>>(to, from, n);
  } else if (size_of(dst.dtype) == 4) {
    copy_items<uint32_t><<<blocks_for(n), kThreads, 0, on>>>(to, from, n);
  } else if (size_of(dst.dtype) == 2) {
    copy_items<uint16_t><<<blocks_for(n), kThreads, 0, on>>>(to, from, n);
  } else if (size_of(dst.dtype) == 1) {
    copy_items<uint8_t><<<blocks_for(n), kThreads, 0, on>>>(to, from, n);
  } else {
    copy_items<uint64_t><<<blocks_for(n), kThreads, 0, on>>>(to, from, n);
  }
  check(cudaGetLastError(), "copy");
}

void CudaOps::zero(Tensor dst) {
  const int64_t n = dst.elements();
  if (n == 0) return;
  const cudaStream_t on = stream();
  expect_that(dst.place != Place::host, "zero", "dst is in plain host memory");
  if (dst.contiguous()) return check(cudaMemsetAsync(dst.data, 0, dst.bytes(), on), "zero");
  const Strided to = strided(dst);
  if (size_of(dst.dtype) == 4) {
    zero_items<uint32_t><<<blocks_for(n), kThreads, 0, on>>>(to, n);
  } else if (size_of(dst.dtype) == 2) {
    zero_items<uint16_t><<<blocks_for(n), kThreads, 0, on>>>(to, n);
  } else if (size_of(dst.dtype) == 1) {
    zero_items<uint8_t><<<blocks_for(n), kThreads, 0, on>>>(to, n);
  } else {
    zero_items<uint64_t><<<blocks_for(n), kThreads, 0, on>>>(to, n);
  }
  check(cudaGetLastError(), "zero");
}

void CudaOps::add(const AddArgs& args) {
  const auto real = [](Dtype t) { return t == Dtype::f32 || t == Dtype::bf16; };
  expect_that(real(args.a.dtype) && real(args.b.dtype), "add", "a and b must be f32 or bf16");
  expect_that(args.a.rank == args.b.rank && args.a.shape == args.b.shape, "add", "shapes differ");
  expect_that(args.a.place != Place::host && args.b.place != Place::host, "add", "a or b is in plain host memory");
  const int64_t n = args.a.elements();
  if (n == 0) return;
  add_items<<<blocks_for(n), kThreads, 0, stream()>>>(strided(args.a), strided(args.b), n);
  check(cudaGetLastError(), "add");
}

Batch CudaOps::staged(const Batch& batch) {
  Batch b = batch;
  const auto parts = {&b.token,  &b.position,    &b.row_seq,    &b.row_begin,   &b.slot,     &b.committed,
                      &b.replay, &b.block_table, &b.export_pos, &b.export_snap, &b.embedding};
  const auto rounded = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  size_t total = 0;
  for (const Tensor* t : parts) {
    if (t->data == nullptr || t->place != Place::host) continue;
    expect_that(t->contiguous(), "batch", "an array in host memory is not contiguous");
    total += rounded(t->bytes());
  }
  if (total == 0) return b;
  std::byte* at = scratch<std::byte>(Area::batch, total);
  const cudaStream_t on = stream();
  for (Tensor* t : parts) {
    if (t->data == nullptr || t->place != Place::host) continue;
    // From pageable memory this returns when the source has been read.
    check(cudaMemcpyAsync(at, t->data, t->bytes(), cudaMemcpyHostToDevice, on), "send the batch");
    t->data = at;
    t->place = Place::device;
    at += rounded(t->bytes());
  }
  return b;
}

Rows CudaOps::rows(std::string_view op, const Batch& batch, int64_t capacity) {
  return rows_of(op, staged(batch), capacity);
}

}  // namespace cuda
}  // namespace glm53
