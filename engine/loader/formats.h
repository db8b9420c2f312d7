// Formats of weights by the names that configuration, command line and prepared folders use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/weight.h"

namespace glm53 {

/// Name of a group in configuration, errors and the memory ledger ("kda_in").
std::string_view name(WeightGroup group);

/// "stored", "fp8" or "int4".
std::string_view format_name(WeightFormat format);

/// Sets a group by its name, or with "dense" the groups that engine.dense speaks for: kda_in, kda_out, mla,
/// shared_expert and dense_mlp. Throws Error(config) for another name of a group or format.
void set_format(FormatPolicy& policy, std::string_view group, std::string_view format);

/// "kda_in fp8, head int4": the groups that are not as stored; "as stored" where there is none.
std::string formats_text(const FormatPolicy& policy);

}  // namespace glm53
