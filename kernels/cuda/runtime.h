// CUDA resources as move-only types, and the one way a CUDA call is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <source_location>
#include <string_view>
#include <utility>

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace glm53::cuda {

/// Throws unless `status` is cudaSuccess: Error(memory) for exhausted memory, Error(device) for everything else, naming
/// what was done, CUDA's own text and the line.
void check(cudaError_t status, std::string_view what,
           const std::source_location& where = std::source_location::current());

/// A non-blocking stream of the current device.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// An event without timing: a point in a stream that can be asked for.
class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  void record(cudaStream_t stream);
  bool done() const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Zero-filled device memory, or pinned host memory that both processors read (host memory is pinned too: every Buffer
/// of this backend can be a source or target of a copy). Throws Error(memory).
Buffer make_buffer(size_t bytes, Place place, int device);

/// Recorded launches of one stream.
class CudaGraph final : public Graph {
 public:
  /// Takes over `graph` and instantiates it.
  CudaGraph(cudaGraph_t graph, cudaStream_t stream, int device);
  ~CudaGraph() override;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  void launch() override;

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaStream_t stream_ = nullptr;
  int device_ = 0;
};

/// Device memory that grows to the largest request and is then kept; contents undefined after get().
class Scratch {
 public:
  /// Throws Error(internal) when it would have to grow while a graph is captured (reserve() was too small).
  std::byte* get(size_t bytes, int device, bool capturing);

 private:
  Buffer memory_;
};

}  // namespace glm53::cuda
