#include "kernels/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "common/error.h"

namespace glm53 {

namespace {

constexpr size_t kAlign = 256;

std::string shape_text(std::span<const int64_t> shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return s + "]";
}

/// Bytes of a shape; throws Error(internal) for a negative or overflowing one.
size_t bytes_of(Dtype dtype, std::span<const int64_t> shape) {
  uint64_t n = size_of(dtype);
  for (const int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(n, static_cast<uint64_t>(d), &n) ||
        n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      throw Error(Code::internal, "tensor shape " + shape_text(shape) + " has no size",
                  "dimensions ≥ 0 whose product fits 63 bits");
    }
  }
  return static_cast<size_t>(n);
}

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kAlign}); }
};

struct HostMemory final : Buffer::Impl {
  explicit HostMemory(size_t size) {
    if (size == 0) return;
    if (size > std::numeric_limits<size_t>::max() - kAlign) throw Error(Code::memory, "cannot allocate host memory");
    const size_t rounded = (size + kAlign - 1) / kAlign * kAlign;
    memory_.reset(static_cast<std::byte*>(::operator new(rounded, std::align_val_t{kAlign}, std::nothrow)));
    if (!memory_) throw Error(Code::memory, "cannot allocate " + std::to_string(size) + " bytes of host memory");
    data = memory_.get();
    std::memset(data, 0, rounded);
    bytes = size;
  }

 private:
  std::unique_ptr<std::byte, AlignedDelete> memory_;
};

}  // namespace

std::string_view name(Dtype t) {
  switch (t) {
    case Dtype::f32:
      return "f32";
    case Dtype::bf16:
      return "bf16";
    case Dtype::f16:
      return "f16";
    case Dtype::e4m3:
      return "e4m3";
    case Dtype::i8:
      return "i8";
    case Dtype::u8:
      return "u8";
    case Dtype::i16:
      return "i16";
    case Dtype::i32:
      return "i32";
    case Dtype::i64:
      return "i64";
  }
  return "?";
}

Tensor Tensor::of(void* data, Dtype dtype, std::span<const int64_t> shape, Place place) {
  Tensor t;
  if (shape.size() > t.shape.size()) {
    throw Error(Code::internal, "tensor of rank " + std::to_string(shape.size()), "at most 4 dimensions");
  }
  bytes_of(dtype, shape);
  t.data = data;
  t.dtype = dtype;
  t.place = place;
  t.rank = static_cast<uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape.begin());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    t.stride[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
  }
  return t;
}

int64_t Tensor::elements() const {
  int64_t n = 1;
  for (size_t i = 0; i < rank; ++i) n *= shape[i];
  return n;
}

bool Tensor::contiguous() const {
  int64_t want = 1;
  for (size_t i = rank; i-- > 0;) {
    if (shape[i] != 1 && stride[i] != want) return false;
    want *= std::max<int64_t>(shape[i], 1);
  }
  return true;
}

namespace {

/// Part [begin, end) of one dimension.
Tensor cut(const Tensor& t, size_t dimension, int64_t begin, int64_t end) {
  if (begin < 0 || begin > end || end > t.shape[dimension]) {
    throw Error(Code::internal, "tensor part [" + std::to_string(begin) + ", " + std::to_string(end) +
                                    ") of dimension " + std::to_string(dimension) + " of " +
                                    shape_text(std::span(t.shape).first(t.rank)));
  }
  Tensor part = t;
  part.shape[dimension] = end - begin;
  if (t.data != nullptr) {
    part.data = static_cast<std::byte*>(t.data) + begin * t.stride[dimension] * static_cast<int64_t>(size_of(t.dtype));
  }
  return part;
}

void require_rank(const Tensor& t, const char* what) {
  if (t.rank == 0) throw Error(Code::internal, std::string("tensor of rank 0 has no ") + what);
}

}  // namespace

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  require_rank(*this, "rows");
  return cut(*this, 0, begin, end);
}

Tensor Tensor::columns(int64_t begin, int64_t end) const {
  require_rank(*this, "columns");
  return cut(*this, rank - 1u, begin, end);
}

Tensor Tensor::operator[](int64_t i) const {
  require_rank(*this, "rows");
  Tensor t = cut(*this, 0, i, i + 1);
  for (size_t d = 1; d < rank; ++d) {
    t.shape[d - 1] = t.shape[d];
    t.stride[d - 1] = t.stride[d];
  }
  t.rank = static_cast<uint8_t>(rank - 1);
  t.shape[t.rank] = 0;
  t.stride[t.rank] = 0;
  return t;
}

Tensor Tensor::reshaped(std::initializer_list<int64_t> to) const {
  const Tensor t = of(data, dtype, to, place);
  if (!contiguous() || t.elements() != elements()) {
    throw Error(Code::internal,
                "cannot reshape " + shape_text(std::span(shape).first(rank)) + " to " +
                    shape_text(std::span(to.begin(), to.size())),
                "a contiguous tensor and the same number of elements");
  }
  return t;
}

Buffer::Buffer() = default;
Buffer::Buffer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&&) noexcept = default;
Buffer::~Buffer() = default;

size_t Buffer::bytes() const {
  return impl_ ? impl_->bytes : 0;
}
std::byte* Buffer::data() const {
  return impl_ ? impl_->data : nullptr;
}

Tensor Buffer::view(Dtype dtype, std::span<const int64_t> shape, size_t byte_offset) const {
  const size_t want = bytes_of(dtype, shape);
  if (byte_offset > bytes() || want > bytes() - byte_offset) {
    throw Error(Code::internal, "view of " + std::to_string(want) + " bytes at " + std::to_string(byte_offset) +
                                    " in a buffer of " + std::to_string(bytes()) + " bytes");
  }
  std::byte* at = data() == nullptr ? nullptr : data() + byte_offset;
  return Tensor::of(at, dtype, shape, impl_ ? impl_->place : Place::host);
}

Buffer host_buffer(size_t bytes) {
  return Buffer(std::make_unique<HostMemory>(bytes));
}

Tensor Arena::take(Dtype dtype, std::span<const int64_t> shape) {
  const size_t want = bytes_of(dtype, shape);
  const size_t begin = (at_ + kAlign - 1) / kAlign * kAlign;
  if (begin > capacity() || want > capacity() - begin) {
    throw Error(Code::memory, "arena is too small: wanted " + std::to_string(want) + " bytes, free " +
                                  std::to_string(capacity() - std::min(begin, capacity())) + " of " +
                                  std::to_string(capacity()));
  }
  const Tensor t = memory_.view(dtype, shape, begin);
  at_ = begin + want;
  high_ = std::max(high_, at_);
  return t;
}

}  // namespace glm53
