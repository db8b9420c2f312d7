// Time of a decode step of one rank, with generated weights: any configuration, any number of ranks, nothing to
// download.
//   bench_step [--model DIR] [--rows 1,4,8,16,32] [--context N] [--dense bf16|fp8|int4] [--head bf16|fp8|int4] [--tp 2]
//              [--kv auto|f32|bf16|fp8_c528|int8_c528] [--reps N] [--graph 0|1] [--json FILE] [--compare OLD.json]
// DIR needs config.json only. Prints time, bytes, GB/s, share of the copy rate measured at the start, and what the step
// would take on a GB10 (docs/performance.md), which is a projection and no measurement. The other ranks' sums are
// replaced by copies of the same size.
#include <iostream>

#include "bench/step_bench.h"

int main(int argc, char** argv) {
  try {
    return glm53::run_step_bench(glm53::parse_step_options(argc, argv, "bench_step"));
  } catch (const std::exception& e) {
    std::cerr << "bench_step: " << e.what() << "\n";
    return 1;
  }
}
