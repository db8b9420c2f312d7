#include "engine/loader/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/loader/json_text.h"

namespace glm53 {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of the format
constexpr size_t kLongestName = 1024;
constexpr size_t kHighestRank = 8;

std::optional<Dtype> dtype_of(std::string_view text) {
  constexpr std::pair<std::string_view, Dtype> kTable[] = {
      {"F32", Dtype::f32}, {"BF16", Dtype::bf16}, {"F16", Dtype::f16}, {"F8_E4M3", Dtype::e4m3}, {"I8", Dtype::i8},
      {"U8", Dtype::u8},   {"I16", Dtype::i16},   {"I32", Dtype::i32}, {"I64", Dtype::i64}};
  for (const auto& [key, dtype] : kTable)
    if (key == text) return dtype;
  return std::nullopt;
}

[[noreturn]] void damaged(const std::string& where, const std::string& what) {
  throw Error(Code::weights, cat(where, ": ", what), "the file is damaged or not safetensors; download it again");
}

/// Bytes of a shape; nullopt when they do not fit 63 bits.
std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, Dtype dtype) {
  int64_t total = static_cast<int64_t>(size_of(dtype));
  for (const int64_t d : shape)
    if (__builtin_mul_overflow(total, d, &total)) return std::nullopt;
  return static_cast<uint64_t>(total);
}

std::vector<int64_t> read_shape(const nlohmann::json& json, const std::string& where) {
  if (!json.is_array()) damaged(where, "\"shape\" is not a list");
  if (json.size() > kHighestRank)
    damaged(where, cat("\"shape\" has ", json.size(), " dimensions, at most ", kHighestRank));
  std::vector<int64_t> shape;
  for (const auto& d : json) {
    if (!d.is_number_unsigned() || d.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
      damaged(where, cat("\"shape\" holds ", d.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                         ", expected sizes from 0 to 2^63 − 1"));
    shape.push_back(d.get<int64_t>());
  }
  return shape;
}

/// One header entry; offsets are relative to the data section of `data_bytes` bytes.
TensorInfo read_entry(const nlohmann::json& json, uint64_t data_bytes, const std::string& where) {
  if (!json.is_object()) damaged(where, "the header entry is not an object");
  for (const char* field : {"dtype", "shape", "data_offsets"})
    if (!json.contains(field)) damaged(where, cat("\"", field, "\" is missing"));
  const auto& dtype = json["dtype"];
  const auto& offsets = json["data_offsets"];
  TensorInfo info;
  const auto known = dtype.is_string() ? dtype_of(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!known)
    damaged(where, cat("\"dtype\" is ", dtype.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                       ", expected F32, BF16, F16, F8_E4M3, I8, U8, I16, I32 or I64"));
  info.dtype = *known;
  info.shape = read_shape(json["shape"], where);
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned())
    damaged(where, "\"data_offsets\" is not a pair of integers from 0");
  info.begin = offsets[0].get<uint64_t>();
  info.end = offsets[1].get<uint64_t>();
  if (info.begin > info.end || info.end > data_bytes)
    damaged(where,
            cat("bytes ", info.begin, " to ", info.end, " are outside the file's ", data_bytes, " bytes of data"));
  const auto expected = bytes_of(info.shape, info.dtype);
  if (!expected) damaged(where, "the size of \"shape\" overflows");
  if (*expected != info.end - info.begin)
    damaged(where, cat("holds ", info.end - info.begin, " bytes, its shape and dtype need ", *expected));
  return info;
}

/// The data section must be covered exactly once.
void check_cover(const std::map<std::string, TensorInfo, std::less<>>& tensors, uint64_t data_bytes,
                 const std::string& path) {
  std::vector<const std::pair<const std::string, TensorInfo>*> order;
  for (const auto& entry : tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t at = 0;
  for (const auto* entry : order) {
    const TensorInfo& info = entry->second;
    if (info.begin < at)
      damaged(path, cat("tensor ", entry->first, " overlaps another at byte ", info.begin, " of the data"));
    if (info.begin > at)
      damaged(path, cat("bytes ", at, " to ", info.begin, " of the data, before tensor ", entry->first,
                        ", belong to no tensor"));
    at = info.end;
  }
  if (at != data_bytes) damaged(path, cat("bytes ", at, " to ", data_bytes, " of the data belong to no tensor"));
}

std::string base_name(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

}  // namespace

struct SafetensorsFile::Impl {
  explicit Impl(const std::string& file) : path(file), map(file) {}

  std::string path;
  MappedFile map;
  std::string_view header;
  std::map<std::string, TensorInfo, std::less<>> tensors;

  void parse() {
    const std::span<const std::byte> all = map.bytes();
    if (all.size() < kLengthBytes) damaged(path, cat("has ", all.size(), " bytes, too few for the length of a header"));
    uint64_t length = 0;
    std::memcpy(&length, all.data(), sizeof length);
    if (length > kLongestHeader) damaged(path, cat("header of ", length, " bytes, at most ", kLongestHeader));
    if (length > all.size() - kLengthBytes)
      damaged(path, cat("header of ", length, " bytes in a file of ", all.size(), ": truncated"));
    header = {reinterpret_cast<const char*>(all.data()) + kLengthBytes, static_cast<size_t>(length)};
    const uint64_t data_begin = kLengthBytes + length, data_bytes = all.size() - data_begin;
    const nlohmann::json json = parse_json_object(header, path, Code::weights);
    const std::string file = base_name(path);
    for (const auto& [key, value] : json.items()) {
      if (key == "__metadata__") continue;
      if (key.empty() || key.size() > kLongestName)
        damaged(path, cat("a tensor name has ", key.size(), " bytes, expected 1 to ", kLongestName));
      tensors.emplace(key, read_entry(value, data_bytes, cat(path, ": tensor ", key)));
    }
    check_cover(tensors, data_bytes, path);
    for (auto& [key, info] : tensors) {
      info.file = file;
      info.begin += data_begin;
      info.end += data_begin;
    }
  }
};

SafetensorsFile::SafetensorsFile(const std::string& path) {
  try {
    impl_ = std::make_unique<Impl>(path);
  } catch (const Error& e) {
    throw Error(Code::weights, e.what(), e.remedy());
  }
  impl_->parse();
}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

const std::map<std::string, TensorInfo, std::less<>>& SafetensorsFile::tensors() const {
  return impl_->tensors;
}
bool SafetensorsFile::has(std::string_view name) const {
  return impl_->tensors.contains(name);
}
std::string_view SafetensorsFile::header() const {
  return impl_->header;
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorInfo& info) const {
  const auto all = impl_->map.bytes();
  if (info.begin > info.end || info.end > all.size())
    throw Error(Code::internal, cat(impl_->path, ": a tensor of another file was asked for"));
  return all.subspan(info.begin, info.end - info.begin);
}

Tensor SafetensorsFile::view(std::string_view name) const {
  constexpr size_t kMaxRank = 4;
  const auto it = impl_->tensors.find(name);
  if (it == impl_->tensors.end()) throw Error(Code::weights, cat(impl_->path, ": no tensor ", name));
  const TensorInfo& info = it->second;
  const auto data = bytes(info);
  if (info.shape.size() > kMaxRank)
    throw Error(Code::weights,
                cat(impl_->path, ": tensor ", name, " has ", info.shape.size(), " dimensions, at most 4"));
  if (!data.empty() && reinterpret_cast<uintptr_t>(data.data()) % size_of(info.dtype) != 0)
    throw Error(Code::weights, cat(impl_->path, ": tensor ", name, " is not aligned to its element"),
                "copy its bytes instead of viewing them");
  // Tensor has no read-only form; the map is read-only, so a write through the view faults.
  auto* start = const_cast<std::byte*>(data.data());
  return Tensor::of(start, info.dtype, std::span<const int64_t>(info.shape));
}

}  // namespace glm53
