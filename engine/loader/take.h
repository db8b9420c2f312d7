// What is asked of a WeightSource, as a value: so that a load can be planned before it begins.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/weight.h"

namespace glm53 {

/// One call of take() (one part) or take_stacked().
struct Take {
  std::vector<StackPart> parts;
  WeightGroup group{};
  bool stacked = false;
};
bool operator==(const Take& a, const Take& b);

/// Remembers what is taken and gives out empty weights.
class TakeRecorder final : public WeightSource {
 public:
  Weight take(std::string_view name, WeightGroup group, Split split) override;
  Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) override;
  bool has(std::string_view) const override { return true; }
  std::string digest() const override { return {}; }
  uint64_t bytes_taken() const override { return 0; }
  const std::vector<Take>& takes() const { return takes_; }

 private:
  std::vector<Take> takes_;
};

}  // namespace glm53
