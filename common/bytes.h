// Bounds-checked little-endian encoding for frames and files of our own.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "common/error.h"

namespace glm53 {

static_assert(std::endian::native == std::endian::little, "frames and checkpoints are little-endian");

/// Appends fixed-width values, strings and vectors (u32 count, then elements).
class ByteWriter {
 public:
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void put(T v) {
    const auto* p = reinterpret_cast<const std::byte*>(&v);
    out_.insert(out_.end(), p, p + sizeof v);
  }
  void put(const std::string& s) {
    put(static_cast<uint32_t>(s.size()));
    const auto* p = reinterpret_cast<const std::byte*>(s.data());
    out_.insert(out_.end(), p, p + s.size());
  }
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void put(const std::vector<T>& v) {
    put(static_cast<uint32_t>(v.size()));
    const auto* p = reinterpret_cast<const std::byte*>(v.data());
    out_.insert(out_.end(), p, p + v.size() * sizeof(T));
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

/// Reads what ByteWriter wrote; throws Error(corrupt) instead of reading past the end.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> in) : in_(in) {}
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  T get() {
    need(sizeof(T));
    T v;
    std::memcpy(&v, in_.data(), sizeof v);
    in_ = in_.subspan(sizeof v);
    return v;
  }
  std::string get_string() {
    const auto n = get<uint32_t>();
    need(n);
    std::string s(reinterpret_cast<const char*>(in_.data()), n);
    in_ = in_.subspan(n);
    return s;
  }
  template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  std::vector<T> get_vector() {
    const auto n = count(sizeof(T));
    std::vector<T> v(n);
    if (n != 0) std::memcpy(v.data(), in_.data(), n * sizeof(T));
    in_ = in_.subspan(n * sizeof(T));
    return v;
  }
  /// Element count of a sequence whose elements take at least `element_bytes`: bounded by what is left.
  uint32_t count(size_t element_bytes) {
    const auto n = get<uint32_t>();
    need(static_cast<size_t>(n) * element_bytes);
    return n;
  }
  size_t left() const { return in_.size(); }
  /// Throws unless everything was read.
  void finish() const {
    if (!in_.empty()) throw Error(Code::corrupt, "frame has bytes after its end");
  }

 private:
  void need(size_t n) const {
    if (in_.size() < n) throw Error(Code::corrupt, "frame ends early");
  }
  std::span<const std::byte> in_;
};

}  // namespace glm53
