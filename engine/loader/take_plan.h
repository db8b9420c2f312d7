// Which bytes of a checkpoint a rank needs for a weight, and what becomes of them. Nothing is read here but headers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/loader/safetensors.h"
#include "engine/loader/take.h"
#include "kernels/weight.h"

namespace glm53 {

/// Bytes of a tensor cut for one rank: `rows` runs of `bytes` each, `pitch` apart in the file. A row cut is one run.
struct Cut {
  std::string tensor;
  uint64_t begin = 0;  ///< in the file
  uint64_t rows = 0, bytes = 0, pitch = 0;
  uint64_t total() const { return rows * bytes; }
  /// Length in the file from the first run to the end of the last.
  uint64_t span() const { return rows == 0 ? 0 : (rows - 1) * pitch + bytes; }
};

/// One tensor of a weight: the cuts lie behind one another.
struct PlannedTensor {
  std::vector<Cut> cuts;
  Dtype dtype{};
  std::vector<int64_t> shape;
  uint64_t bytes() const;
};

/// A codebook marker of an EXL3 linear: a tensor that must hold this number.
struct PlannedMarker {
  Cut cut;
  uint32_t expected = 0;
};

struct TakePlan {
  std::string name;                    ///< of the first tensor, for errors
  Weight weight;                       ///< as stored: sizes and format, no data
  WeightFormat to{};                   ///< format it becomes
  std::vector<PlannedTensor> tensors;  ///< codes; of EXL3 also suh and svh
  std::vector<PlannedMarker> markers;
};

class TakePlanner {
 public:
  /// Throws Error(unavailable) naming the group whose format is neither as stored nor one its weights can have.
  /// `tensors` outlives the planner.
  TakePlanner(const TensorTable& tensors, const FormatPolicy& policy, Shard shard);

  /// Throws Error(weights) where the checkpoint cannot give this.
  TakePlan plan(const Take& take) const;
  bool has(std::string_view tensor) const;
  const FormatPolicy& policy() const { return policy_; }
  Shard shard() const { return shard_; }

 private:
  struct Range;
  Range range_of(int64_t whole, Split split, Split along, int64_t multiple, std::string_view tensor) const;
  Cut cut(const std::string& tensor, uint64_t width, Range rows, Range columns, size_t element) const;
  TakePlan plain(const std::vector<StackPart>& parts, WeightGroup group) const;
  TakePlan packed(std::string_view stem, Split split) const;
  void expect_scales(const std::string& tensor, int64_t n) const;
  Codebook markers(std::string_view stem, std::vector<PlannedMarker>& out) const;

  const TensorInfo& info(std::string_view tensor) const;

  const TensorTable& tensors_;
  FormatPolicy policy_;
  Shard shard_;
};

/// Throws Error(unavailable) unless weights of the group can be stored like that: as stored, or quantised where only
/// linears use them.
void check_format(WeightGroup group, WeightFormat format);

}  // namespace glm53
