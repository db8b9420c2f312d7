#include <algorithm>
#include <string>

#include "common/error.h"
#include "kernels/cuda/runtime.h"

namespace glm53::cuda {
namespace {

struct CudaMemory final : Buffer::Impl {
  explicit CudaMemory(int on) : device(on) {}
  ~CudaMemory() override {
    if (data == nullptr) return;
    // A destructor cannot report; a failure here means the context is lost and the next checked call says so.
    if (place == Place::device) {
      static_cast<void>(cudaSetDevice(device));
      static_cast<void>(cudaFree(data));
    } else {
      static_cast<void>(cudaFreeHost(data));
    }
  }
  int device;
};

}  // namespace

void check(cudaError_t status, std::string_view what, const std::source_location& where) {
  if (status == cudaSuccess) return;
  const Code code = status == cudaErrorMemoryAllocation ? Code::memory : Code::device;
  throw Error(code, "CUDA: " + std::string(what) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                        ", " + where.file_name() + ":" + std::to_string(where.line()) + ")");
}

Stream::Stream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
}
Stream::~Stream() {
  static_cast<void>(cudaStreamDestroy(stream_));
}

Event::Event() {
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event");
}
Event::~Event() {
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
}
void Event::record(cudaStream_t stream) {
  check(cudaEventRecord(event_, stream), "record an event");
}
bool Event::done() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  check(status, "query an event");
  return true;
}

Buffer make_buffer(size_t bytes, Place place, int device) {
  auto memory = std::make_unique<CudaMemory>(device);
  const size_t size = std::max<size_t>(bytes, 1);
  check(cudaSetDevice(device), "select the device");
  void* data = nullptr;
  const std::string what = "allocate " + std::to_string(bytes) + " bytes of ";
  if (place == Place::device) {
    check(cudaMalloc(&data, size), what + "device memory");
  } else {
    check(cudaHostAlloc(&data, size, cudaHostAllocPortable | cudaHostAllocMapped), what + "pinned memory");
  }
  memory->data = static_cast<std::byte*>(data);
  memory->bytes = bytes;
  memory->place = place;
  if (place == Place::device) {
    check(cudaMemset(data, 0, size), "zero new memory");
    check(cudaDeviceSynchronize(), "zero new memory");  // other streams do not wait for the default one
  } else {
    std::fill_n(memory->data, size, std::byte{0});
  }
  return Buffer(std::move(memory));
}

CudaGraph::CudaGraph(cudaGraph_t graph, cudaStream_t stream, int device)
    : graph_(graph), stream_(stream), device_(device) {
  const cudaError_t status = cudaGraphInstantiate(&exec_, graph_, 0);
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGraphDestroy(graph_));
  check(status, "instantiate a graph");
}
CudaGraph::~CudaGraph() {
  static_cast<void>(cudaGraphExecDestroy(exec_));
  static_cast<void>(cudaGraphDestroy(graph_));
}
void CudaGraph::launch() {
  check(cudaSetDevice(device_), "select the device");
  check(cudaGraphLaunch(exec_, stream_), "launch a graph");
}

std::byte* Scratch::get(size_t bytes, int device, bool capturing) {
  if (memory_.bytes() < bytes) {
    if (capturing)
      throw Error(Code::internal, "CUDA: scratch would grow while a graph is captured", "a larger reserve()");
    memory_ = Buffer();  // frees first, which waits for the device
    memory_ = make_buffer(bytes + bytes / 4, Place::device, device);
  }
  return memory_.data();
}

}  // namespace glm53::cuda
