#include "engine/runtime/rank_weights.h"

#include "common/strings.h"
#include "engine/loader/formats.h"

namespace glm53 {
namespace {

constexpr WeightGroup kNamed[] = {WeightGroup::kda_in,        WeightGroup::kda_out,   WeightGroup::mla,
                                  WeightGroup::shared_expert, WeightGroup::dense_mlp, WeightGroup::indexer,
                                  WeightGroup::drafter};

}  // namespace

FormatPolicy format_policy(const Config& config) {
  FormatPolicy policy = FormatPolicy::as_stored();
  set_format(policy, "dense", config.text("engine.dense"));
  set_format(policy, "head", config.text("engine.head"));
  for (const WeightGroup group : kNamed)
    if (const std::string& format = config.text(cat("engine.formats.", name(group))); format != "auto")
      set_format(policy, name(group), format);
  return policy;
}

std::string formats_of(const Config& config) {
  return cat(config.text("serve.kv_format"), " weights ", formats_text(format_policy(config)));
}

LoadOptions load_options(const Config& config) {
  LoadOptions options;
  options.check_values = config.boolean("engine.check_weights");
  if (!config.text("model.prepared").empty()) options.prepared = config.path("model.prepared");
  return options;
}

}  // namespace glm53
