// The operators of a step that work on caches or on rows alone, at one rank's real sizes.
#pragma once

#include "bench/gpu_bench.h"

namespace glm53 {

void bench_step_ops(Bench& bench);
/// Of rows of logits.
void bench_sampling(Bench& bench);

}  // namespace glm53
