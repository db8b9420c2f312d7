// Launches that overlap their start with the end of the kernel before (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/runtime.h"

namespace glm53::cuda {

/// Waits, in a kernel started by launch_next, until everything before it in the stream is done and visible. Each such
/// kernel calls it once, on every path that ends normally before its first access to memory that an earlier kernel
/// writes, and before its first write.
__device__ inline void after_previous() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

/// Starts a kernel that calls after_previous(), with `shared` bytes of dynamic shared memory. Its blocks may come to
/// the card while the last ones of the kernel before still run. Throws on a failed launch.
template <class... Parameters, class... Values>
void launch_next_shared(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t on,
                        const Values&... values) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = on;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(values)...), "launch");
}
template <class... Parameters, class... Values>
void launch_next(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t on, const Values&... values) {
  launch_next_shared(kernel, grid, block, 0, on, values...);
}

}  // namespace glm53::cuda
