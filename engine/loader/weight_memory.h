// Memory of weights in the backend, and the way of bytes into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace glm53 {

/// Places tensors for as long as it lives: large ones alone, small ones together. `ops` outlives it.
class WeightMemory {
 public:
  explicit WeightMemory(Ops& ops) : ops_(ops) {}

  /// Uninitialised memory of the backend, on a boundary of 256 bytes.
  Tensor place(size_t bytes, Dtype dtype, std::span<const int64_t> shape);
  Tensor place(size_t bytes, Dtype dtype, std::initializer_list<int64_t> shape) {
    return place(bytes, dtype, std::span(shape.begin(), shape.size()));
  }

  /// Gives all of it back.
  void clear();

  /// Fills a tensor from its first byte to its last, however the bytes arrive. Memory that the processor cannot write
  /// is reached through one staging buffer of a fixed size.
  class Filler {
   public:
    Filler(WeightMemory& memory, const Tensor& to);
    void append(std::span<const std::byte> bytes);
    /// Throws Error(internal) unless the tensor is full.
    void finish();

   private:
    void flush();
    WeightMemory& memory_;
    Tensor to_;
    size_t at_ = 0, staged_ = 0;
  };

 private:
  Ops& ops_;
  std::vector<Buffer> buffers_, slabs_;
  size_t slab_used_ = 0;
  Buffer staging_;
};

}  // namespace glm53
