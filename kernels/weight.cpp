#include "kernels/weight.h"

namespace glm53 {

FormatPolicy FormatPolicy::as_stored() {
  FormatPolicy policy;
  policy.of_group.fill(WeightFormat::bf16);
  policy.of_group[static_cast<size_t>(WeightGroup::routed_expert)] = WeightFormat::exl3;
  return policy;
}

}  // namespace glm53
