// As bench_step, each layer by itself: the model stops in front of and behind it. The first layer includes the
// embedding, the last one the head. The same options.
#include <iostream>

#include "bench/step_bench.h"

int main(int argc, char** argv) {
  try {
    glm53::StepOptions options = glm53::parse_step_options(argc, argv, "bench_layer");
    options.layers = true;
    return glm53::run_step_bench(options);
  } catch (const std::exception& e) {
    std::cerr << "bench_layer: " << e.what() << "\n";
    return 1;
  }
}
