// Taking a layer's weights from a source, with the bytes counted by group.
#pragma once

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/weight.h"

namespace glm53 {

/// Bytes a model holds, by weight group.
struct WeightLedger {
  std::array<size_t, kWeightGroups> bytes{};
  /// Groups that hold anything, by name.
  std::vector<std::pair<std::string, size_t>> lines() const;
};

/// A source seen from one prefix of the checkpoint ("model.language_model.layers.3.self_attn.").
class WeightReader {
 public:
  WeightReader(WeightSource& source, WeightLedger& ledger, std::string prefix);
  WeightReader under(std::string_view more) const;

  Weight take(std::string_view name, WeightGroup group, Split split = Split::none) const;
  /// Several matrices over the same input as one; each cut as it says.
  Weight stacked(std::initializer_list<StackPart> parts, WeightGroup group) const;

 private:
  WeightSource* source_;
  WeightLedger* ledger_;
  std::string prefix_;
};

}  // namespace glm53
