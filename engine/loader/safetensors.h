// Safetensors files: header fully validated before a byte of data is used, data memory-mapped.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"

namespace glm53 {

struct TensorInfo {
  std::string file;  ///< file name inside the folder
  Dtype dtype{};
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< byte range inside the file
};

/// Tensors by name.
using TensorTable = std::map<std::string, TensorInfo, std::less<>>;

/// One file. Throws Error(weights) naming file, field and what would be right: truncated, header too long, invalid
/// JSON, unknown dtype, negative or overflowing shape, range outside the file, overlap, gap, size that contradicts the
/// shape.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();
  const std::map<std::string, TensorInfo, std::less<>>& tensors() const;
  std::span<const std::byte> bytes(const TensorInfo& info) const;
  /// Text of the header.
  std::string_view header() const;
  /// Read-only view of a tensor; valid as long as this object. Throws Error(weights) for rank > 4, or when the file
  /// does not align the tensor to its element (the format does not promise it; use bytes() then).
  Tensor view(std::string_view name) const;
  bool has(std::string_view name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// All tensors of a checkpoint folder: model.safetensors.index.json with its shards, or one model.safetensors.
/// Throws Error(weights) naming every missing shard, a tensor that the index places wrongly, in two shards, or nowhere.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& dir);
  Checkpoint(Checkpoint&&) noexcept;
  ~Checkpoint();
  const std::map<std::string, TensorInfo, std::less<>>& tensors() const;
  bool has(std::string_view name) const;
  /// Throw Error(weights) when there is no such tensor. info() and bytes() of the same name belong together.
  const TensorInfo& info(std::string_view name) const;
  std::span<const std::byte> bytes(std::string_view name) const;
  Tensor view(std::string_view name) const;
  /// Digest of the index and headers (not of the data).
  const std::string& digest() const;
  const std::string& dir() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct ModelConfig;
/// Checks the inventory before compute: every tensor of the text model (and MTP layer) present with the right shape and
/// dtype, none surplus (vision tensors are allowed and not needed). Collects all findings into one Error(weights), a
/// line each: tensor, file, found, expected.
void check_inventory(const Checkpoint& checkpoint, const ModelConfig& config);
/// The tensors that check_inventory expects, as if they lay in one file without a header; routed experts in EXL3 (MCG)
/// of that many bits, 0: plain.
TensorTable implied_tensors(const ModelConfig& config, int bits);
/// True when the routed experts of the checkpoint are EXL3-packed.
bool has_exl3_experts(const Checkpoint& checkpoint);

}  // namespace glm53
