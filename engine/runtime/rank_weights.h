// What the configuration says about weights.
#pragma once

#include <string>

#include "common/config.h"
#include "engine/model/load.h"
#include "kernels/weight.h"

namespace glm53 {

/// Formats by group: engine.dense and engine.head, then engine.formats.* where it is not auto.
FormatPolicy format_policy(const Config& config);

/// Everything besides the checkpoint that decides what is computed.
std::string formats_of(const Config& config);

/// engine.check_weights and model.prepared.
LoadOptions load_options(const Config& config);

}  // namespace glm53
