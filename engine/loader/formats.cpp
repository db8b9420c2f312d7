#include "engine/loader/formats.h"

#include <algorithm>
#include <array>

#include "common/error.h"
#include "common/strings.h"
#include "engine/loader/take_plan.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

constexpr std::array<std::string_view, kWeightGroups> kGroups = {
    "kda_in", "kda_out", "mla", "indexer", "shared_expert", "dense_mlp", "routed_expert", "head", "drafter", "exact"};

constexpr WeightGroup kDense[] = {WeightGroup::kda_in, WeightGroup::kda_out, WeightGroup::mla,
                                  WeightGroup::shared_expert, WeightGroup::dense_mlp};

}  // namespace

std::string_view name(WeightGroup group) {
  return kGroups[static_cast<size_t>(group)];
}

std::string_view format_name(WeightFormat format) {
  return format == WeightFormat::fp8_row ? "fp8" : format == WeightFormat::int4_g32 ? "int4" : "stored";
}

void set_format(FormatPolicy& policy, std::string_view group, std::string_view format) {
  if (format != "stored" && format != "fp8" && format != "int4")
    throw Error(Code::config, cat("'", format, "' is no format of weights"), "stored, fp8 or int4");
  const auto set = [&](WeightGroup g) {
    WeightFormat& to = policy.of_group[static_cast<size_t>(g)];
    to = format == "fp8"    ? WeightFormat::fp8_row
         : format == "int4" ? WeightFormat::int4_g32
                            : FormatPolicy::as_stored().of(g);
    check_format(g, to);
  };
  if (group == "dense") {
    for (const WeightGroup g : kDense) set(g);
    return;
  }
  const auto at = std::find(kGroups.begin(), kGroups.end(), group);
  if (at == kGroups.end())
    throw Error(Code::config, cat("'", group, "' is no group of weights"),
                cat("dense, ", join(std::vector<std::string>(kGroups.begin(), kGroups.end()), ", ")));
  set(static_cast<WeightGroup>(at - kGroups.begin()));
}

std::string formats_text(const FormatPolicy& policy) {
  std::string out;
  for (int g = 0; g < kWeightGroups; ++g) {
    const auto group = static_cast<WeightGroup>(g);
    if (is_quantised(policy.of(group)))
      out += cat(out.empty() ? "" : ", ", name(group), " ", format_name(policy.of(group)));
  }
  return out.empty() ? "as stored" : out;
}

}  // namespace glm53
