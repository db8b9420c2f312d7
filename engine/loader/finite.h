// Finding values that are no numbers, in single tensors and in whole checkpoints.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loader/block_reader.h"
#include "engine/loader/safetensors.h"

namespace glm53 {

/// Counts the NaN and infinite values of a tensor whose bytes come in pieces of any length. Types that have none
/// (codes) count nothing.
class ValueCheck {
 public:
  explicit ValueCheck(Dtype dtype) : dtype_(dtype) {}
  void append(std::span<const std::byte> bytes);
  uint64_t nan() const { return nan_; }
  uint64_t infinite() const { return infinite_; }
  bool ok() const { return nan_ + infinite_ == 0; }
  /// Number of the first such element; of use where !ok().
  uint64_t first() const { return first_; }

 private:
  void count(std::span<const std::byte> bytes);
  Dtype dtype_;
  uint64_t nan_ = 0, infinite_ = 0, first_ = 0, at_ = 0;
  std::array<std::byte, 4> carried_{};  // of an element whose end has not come
  size_t carried_bytes_ = 0;
};

/// "layer 3, " of a name inside a layer, "" outside.
std::string layer_of(std::string_view tensor);
/// "2 NaN and 1 infinite of 4096 bf16 values, the first at [3, 17]"; `shape` gives the place.
std::string describe(const ValueCheck& check, Dtype dtype, std::span<const int64_t> shape);

struct CheckpointValues {
  uint64_t tensors = 0, bytes = 0;  ///< that were read
  uint64_t bad_tensors = 0, nan = 0, infinite = 0;
  std::vector<std::string> findings;  ///< one a tensor: layer, name, file, counts; at most kMostFindings
  static constexpr size_t kMostFindings = 200;
};
/// Reads every tensor of a checkpoint once, in the order of the files. `progress` may be empty.
CheckpointValues check_values(const Checkpoint& checkpoint, const ReadOptions& options = {},
                              const std::function<void(uint64_t done, uint64_t total)>& progress = {});

}  // namespace glm53
