// How often tests cut something off at random: GLM53_KILLS, which scripts/test.sh --full sets.
#pragma once

#include <algorithm>

#include "common/process.h"
#include "common/strings.h"

namespace glm53::test {

/// Half of GLM53_KILLS; `least` without it, or where that is more.
inline int half_of_kills(int least) {
  const auto given = environment("GLM53_KILLS");
  const auto number = given ? parse_int(*given) : std::nullopt;
  return std::max(least, static_cast<int>(number.value_or(0) / 2));
}

}  // namespace glm53::test
