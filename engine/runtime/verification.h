// Which drafts are accepted (spec speculative §3).
#pragma once

#include <span>

#include "engine/runtime/plan.h"
#include "engine/runtime/sampling.h"

namespace glm53 {

/// Sample and match (§3.4, mode A): a draft is accepted when it is what was sampled from the row before it, so every
/// token is the one that there would be without drafts, for each seed. `out`: what was sampled from the rows of
/// state->rows(drafts), as many of them as there are at least. Accepted tokens and the one behind them are taken into
/// `state`, which is null for a request that has ended. The result names no request.
SeqResult sample_and_match(std::span<const int32_t> drafts, std::span<SampleOut> out, SamplingState* state);

}  // namespace glm53
