#include "engine/loader/weight_memory.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr size_t kSlab = size_t{4} << 20;           // small tensors share allocations of this size
constexpr size_t kOwnAllocation = size_t{1} << 20;  // larger tensors have their own
constexpr size_t kStaging = size_t{16} << 20;
constexpr size_t kAlign = 256;

}  // namespace

Tensor WeightMemory::place(size_t bytes, Dtype dtype, std::span<const int64_t> shape) {
  if (bytes >= kOwnAllocation) {
    buffers_.push_back(ops_.allocate(bytes, Place::device));
    return buffers_.back().view(dtype, shape);
  }
  const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
  if (slabs_.empty() || slab_used_ + rounded > kSlab) {
    slabs_.push_back(ops_.allocate(kSlab, Place::device));
    slab_used_ = 0;
  }
  const Tensor t = slabs_.back().view(dtype, shape, slab_used_);
  slab_used_ += rounded;
  return t;
}

void WeightMemory::clear() {
  buffers_.clear();
  if (slabs_.size() > 1) slabs_.erase(slabs_.begin(), slabs_.end() - 1);
  slab_used_ = 0;
}

WeightMemory::Filler::Filler(WeightMemory& memory, const Tensor& to) : memory_(memory), to_(to) {
  if (to_.place == Place::device && memory_.staging_.bytes() == 0)
    memory_.staging_ = memory_.ops_.allocate(kStaging, Place::pinned);
}

void WeightMemory::Filler::append(std::span<const std::byte> bytes) {
  if (bytes.size() > to_.bytes() - at_ - staged_)
    throw Error(Code::internal, cat("more than the ", to_.bytes(), " bytes of a weight"));
  if (bytes.empty()) return;
  if (to_.place != Place::device) {
    std::memcpy(static_cast<std::byte*>(to_.data) + at_, bytes.data(), bytes.size());
    at_ += bytes.size();
    return;
  }
  while (!bytes.empty()) {
    const size_t n = std::min(bytes.size(), kStaging - staged_);
    std::memcpy(memory_.staging_.data() + staged_, bytes.data(), n);
    staged_ += n;
    bytes = bytes.subspan(n);
    if (staged_ == kStaging) flush();
  }
}

void WeightMemory::Filler::flush() {
  if (staged_ == 0) return;
  const auto n = static_cast<int64_t>(staged_);
  memory_.ops_.copy(Tensor::of(static_cast<std::byte*>(to_.data) + at_, Dtype::u8, {n}, to_.place),
                    memory_.staging_.view(Dtype::u8, {n}));
  memory_.ops_.synchronize();
  at_ += staged_;
  staged_ = 0;
}

void WeightMemory::Filler::finish() {
  flush();
  if (at_ != to_.bytes()) throw Error(Code::internal, cat(at_, " of the ", to_.bytes(), " bytes of a weight came"));
}

}  // namespace glm53
