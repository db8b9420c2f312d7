#include "engine/loader/finite.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <utility>

#include "common/strings.h"

namespace glm53 {
namespace {

/// Bits of the exponent and below it; a value whose exponent is all ones is no number.
struct FloatBits {
  uint32_t exponent = 0, fraction = 0;
};

FloatBits bits_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return {0x7f800000u, 0x007fffffu};
    case Dtype::bf16:
      return {0x7f80u, 0x007fu};
    case Dtype::f16:
      return {0x7c00u, 0x03ffu};
    default:
      return {};
  }
}

template <class Word>
uint64_t suspicious(std::span<const std::byte> bytes, Word exponent) {
  uint64_t n = 0;
  for (size_t i = 0; i + sizeof(Word) <= bytes.size(); i += sizeof(Word)) {
    Word word;
    std::memcpy(&word, bytes.data() + i, sizeof word);
    n += (word & exponent) == exponent;
  }
  return n;
}

}  // namespace

void ValueCheck::append(std::span<const std::byte> bytes) {
  const size_t size = size_of(dtype_);
  if (bits_of(dtype_).exponent == 0 && dtype_ != Dtype::e4m3) return;
  if (carried_bytes_ > 0) {
    const size_t n = std::min(size - carried_bytes_, bytes.size());
    std::memcpy(carried_.data() + carried_bytes_, bytes.data(), n);
    carried_bytes_ += n;
    bytes = bytes.subspan(n);
    if (carried_bytes_ < size) return;
    carried_bytes_ = 0;
    count({carried_.data(), size});
  }
  const size_t whole = bytes.size() / size * size;
  count(bytes.first(whole));
  carried_bytes_ = bytes.size() - whole;
  if (carried_bytes_ > 0) std::memcpy(carried_.data(), bytes.data() + whole, carried_bytes_);
}

void ValueCheck::count(std::span<const std::byte> bytes) {
  const size_t size = size_of(dtype_);
  const uint64_t begin = std::exchange(at_, at_ + bytes.size() / size);
  const FloatBits bits = bits_of(dtype_);
  if (size == 4 && suspicious<uint32_t>(bytes, bits.exponent) == 0) return;
  if (size == 2 && suspicious<uint16_t>(bytes, static_cast<uint16_t>(bits.exponent)) == 0) return;
  for (size_t i = 0; i * size < bytes.size(); ++i) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i * size, size);
    // e4m3 has no infinity, and one NaN of either sign.
    const bool bad = dtype_ == Dtype::e4m3 ? (word & 0x7fu) == 0x7fu : (word & bits.exponent) == bits.exponent;
    if (!bad) continue;
    if (ok()) first_ = begin + i;
    const bool infinite = dtype_ != Dtype::e4m3 && (word & bits.fraction) == 0;
    ++(infinite ? infinite_ : nan_);
  }
}

std::string layer_of(std::string_view tensor) {
  constexpr std::string_view kLayers = "layers.";
  const size_t at = tensor.find(kLayers);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = tensor.substr(at + kLayers.size());
  const auto digits = static_cast<size_t>(
      std::find_if(rest.begin(), rest.end(), [](char c) { return c < '0' || c > '9'; }) - rest.begin());
  return digits == 0 ? std::string() : cat("layer ", rest.substr(0, digits), ", ");
}

std::string describe(const ValueCheck& check, Dtype dtype, std::span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t d : shape) elements *= d;
  std::string place;
  auto left = static_cast<int64_t>(check.first());
  for (size_t i = shape.size(); i-- > 0; left /= std::max<int64_t>(shape[i], 1))
    place = cat(left % std::max<int64_t>(shape[i], 1), place.empty() ? "" : ", ", place);
  return cat(check.nan(), " NaN and ", check.infinite(), " infinite of ", elements, " ", name(dtype),
             " values, the first at [", place, "]");
}

CheckpointValues check_values(const Checkpoint& checkpoint, const ReadOptions& options,
                              const std::function<void(uint64_t done, uint64_t total)>& progress) {
  // By file, then place: every file is read once from its begin to its end.
  std::map<std::pair<std::string, uint64_t>, std::string> order;
  for (const auto& [tensor, info] : checkpoint.tensors())
    if (info.end > info.begin) order.emplace(std::pair(info.file, info.begin), tensor);
  std::vector<std::string> files, names;
  std::vector<FileBlock> blocks;
  uint64_t total = 0;
  for (const auto& [place, tensor] : order) {
    if (names.empty() || names.back() != place.first) {
      names.push_back(place.first);
      files.push_back(cat(checkpoint.dir(), "/", place.first));
    }
    const TensorInfo& info = checkpoint.info(tensor);
    append_blocks(blocks, files.size() - 1, info.begin, info.end, options);
    total += info.end - info.begin;
  }
  CheckpointValues out;
  BlockReader reader(files, std::move(blocks), options);
  for (const auto& [place, tensor] : order) {
    const TensorInfo& info = checkpoint.info(tensor);
    ValueCheck check(info.dtype);
    for (uint64_t left = info.end - info.begin; left > 0;) {
      const auto bytes = reader.next();
      check.append(bytes);
      left -= bytes.size();
      out.bytes += bytes.size();
      if (progress) progress(out.bytes, total);
    }
    ++out.tensors;
    if (check.ok()) continue;
    ++out.bad_tensors;
    out.nan += check.nan();
    out.infinite += check.infinite();
    if (out.findings.size() < CheckpointValues::kMostFindings)
      out.findings.push_back(
          cat(layer_of(tensor), tensor, " (", info.file, "): ", describe(check, info.dtype, info.shape)));
  }
  return out;
}

}  // namespace glm53
