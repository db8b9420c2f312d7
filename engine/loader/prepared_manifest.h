// manifest.json of a prepared folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/loader/prepared.h"

namespace glm53 {

inline constexpr int kPreparedLayout = 1;
inline constexpr uint64_t kPreparedAlign = 256;
inline constexpr uint64_t kPreparedChunk = uint64_t{4} << 20;  ///< bytes under one checksum
inline constexpr const char* kPreparedData = "weights";
inline constexpr const char* kPreparedManifest = "manifest.json";

struct PreparedTensor {
  Dtype dtype{};
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< in the file
};
/// One weight; tensors: codes, then scales, or suh and svh.
struct PreparedWeight {
  Take take;
  Weight weight;  ///< without data
  std::vector<PreparedTensor> tensors;
};
struct PreparedManifest {
  std::string config, checkpoint, sample;
  std::vector<std::string> formats;  ///< by group
  Shard shard;
  uint64_t bytes = 0;  ///< of the file `weights`
  std::vector<uint64_t> sums;
  std::vector<PreparedWeight> weights;
};

PreparedManifest manifest_of(const PreparedKey& key);
std::string write_manifest(const PreparedManifest& manifest);
/// Throws Error(weights) for a text that is no manifest of this version, or not as it was written; `where` names it.
PreparedManifest read_manifest(const std::string& text, const std::string& where);
/// Why these weights are not what is wanted; empty when they are.
std::string difference(const PreparedManifest& found, const PreparedKey& wanted);

/// Tensors that a weight of its format has, in the order of the file.
std::vector<Tensor*> tensors_of(Weight& weight);

}  // namespace glm53
