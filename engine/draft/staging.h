// Memory of drafters: tensors that live as long as their owner, and small integers on their way to the backend.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "kernels/ops.h"

namespace glm53 {

/// Tensors allocated one by one, at load.
class TensorStore {
 public:
  explicit TensorStore(Ops& ops) : ops_(ops) {}
  Tensor take(Dtype dtype, std::initializer_list<int64_t> shape, Place place = Place::device) {
    const Tensor t = Tensor::of(nullptr, dtype, shape, place);
    buffers_.push_back(ops_.allocate(std::max<size_t>(t.bytes(), 1), place));
    return buffers_.back().view(dtype, shape);
  }

 private:
  Ops& ops_;
  std::vector<Buffer> buffers_;
};

/// Lists of integers that operators read: memory of host and backend alike, sized once. A list may be filled anew when
/// the work that reads it is done; begin() waits for that.
template <size_t kLists>
class IntLists {
 public:
  IntLists(Ops& ops, int64_t longest) : ops_(ops) {
    for (Tensor& t : lists_) t = store_.take(Dtype::i32, {longest}, Place::pinned);
  }
  void begin() {
    if (!ops_.done(ticket_)) ops_.synchronize();
  }
  void end() { ticket_ = ops_.record(); }
  /// A list with these values, in place `at`.
  Tensor put(size_t at, std::span<const int32_t> values) {
    const Tensor t = lists_.at(at).rows(0, static_cast<int64_t>(values.size()));
    std::copy(values.begin(), values.end(), t.as<int32_t>());
    return t;
  }

 private:
  Ops& ops_;
  TensorStore store_{ops_};
  std::array<Tensor, kLists> lists_{};
  uint64_t ticket_ = 0;
};

}  // namespace glm53
