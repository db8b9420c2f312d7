// Views of memory, owners of memory, and the arena that plans it.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace glm53 {

enum class Dtype : uint8_t { f32, bf16, f16, e4m3, i8, u8, i16, i32, i64 };
/// Where the bytes live. On GB10 pinned memory is readable by both processors.
enum class Place : uint8_t { host, pinned, device };

constexpr size_t size_of(Dtype t) {
  switch (t) {
    case Dtype::f32:
    case Dtype::i32:
      return 4;
    case Dtype::bf16:
    case Dtype::f16:
    case Dtype::i16:
      return 2;
    case Dtype::e4m3:
    case Dtype::i8:
    case Dtype::u8:
      return 1;
    case Dtype::i64:
      return 8;
  }
  return 0;
}
std::string_view name(Dtype t);

/// A view: trivially copyable, never owns. Strides count elements; the innermost is 1.
struct Tensor {
  void* data = nullptr;
  Dtype dtype{};
  Place place{};
  uint8_t rank = 0;
  std::array<int64_t, 4> shape{}, stride{};

  /// Contiguous view of `data`.
  static Tensor of(void* data, Dtype dtype, std::span<const int64_t> shape, Place place = Place::host);
  static Tensor of(void* data, Dtype dtype, std::initializer_list<int64_t> shape, Place place = Place::host) {
    return of(data, dtype, std::span(shape.begin(), shape.size()), place);
  }

  bool empty() const { return data == nullptr; }
  int64_t dim(int i) const { return shape[static_cast<size_t>(i)]; }
  int64_t elements() const;
  size_t bytes() const { return static_cast<size_t>(elements()) * size_of(dtype); }
  bool contiguous() const;
  /// Rows [begin, end) of the outermost dimension.
  Tensor rows(int64_t begin, int64_t end) const;
  /// Columns [begin, end) of the innermost dimension (keeps the row stride).
  Tensor columns(int64_t begin, int64_t end) const;
  /// Row i as a tensor of one rank less.
  Tensor operator[](int64_t i) const;
  /// The same elements with another shape; needs a contiguous tensor and an equal element count.
  Tensor reshaped(std::initializer_list<int64_t> to) const;
  template <class T>
  T* as() const {
    assert(sizeof(T) == size_of(dtype));
    return static_cast<T*>(data);
  }
};

/// Owns memory of one place; frees it with the allocator it came from.
class Buffer {
 public:
  struct Impl;
  Buffer();
  explicit Buffer(std::unique_ptr<Impl> impl);
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();
  /// Contiguous view at byte_offset; throws Error(internal) when it does not fit.
  Tensor view(Dtype dtype, std::span<const int64_t> shape, size_t byte_offset = 0) const;
  Tensor view(Dtype dtype, std::initializer_list<int64_t> shape, size_t byte_offset = 0) const {
    return view(dtype, std::span(shape.begin(), shape.size()), byte_offset);
  }
  size_t bytes() const;
  std::byte* data() const;

 private:
  std::unique_ptr<Impl> impl_;
};

/// What a Buffer holds; each backend derives its own and frees in the destructor.
struct Buffer::Impl {
  virtual ~Impl() = default;
  std::byte* data = nullptr;
  size_t bytes = 0;
  Place place = Place::host;
};

/// Zero-filled host memory, 256-byte aligned. Throws Error(memory).
Buffer host_buffer(size_t bytes);

/// Bump allocator over one buffer; every tensor starts on a 256-byte boundary.
class Arena {
 public:
  Arena() = default;
  explicit Arena(Buffer memory) : memory_(std::move(memory)) {}
  /// Throws Error(memory) naming wanted and free bytes when the plan was too small.
  Tensor take(Dtype dtype, std::span<const int64_t> shape);
  Tensor take(Dtype dtype, std::initializer_list<int64_t> shape) {
    return take(dtype, std::span(shape.begin(), shape.size()));
  }
  size_t mark() const { return at_; }
  void reset(size_t mark) { at_ = mark; }
  size_t high_water() const { return high_; }
  size_t capacity() const { return memory_.bytes(); }

 private:
  Buffer memory_;
  size_t at_ = 0, high_ = 0;
};

}  // namespace glm53
