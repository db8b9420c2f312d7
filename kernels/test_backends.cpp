// Which backends this build has.
#include "common/error.h"
#include "kernels/ops.h"

namespace glm53 {

#ifndef GLM53_WITH_CUDA
std::unique_ptr<Ops> make_cuda_ops(int device, Dtype) {
  throw Error(Code::unavailable, "CUDA device " + std::to_string(device) + ": this build has no CUDA backend",
              "configure with -DGLM53_CUDA=ON where nvcc is installed, or use the CPU backend");
}
#endif

std::vector<std::unique_ptr<Ops>> test_backends() {
  std::vector<std::unique_ptr<Ops>> all;
  all.push_back(make_cpu_ops(2));
  try {
    all.push_back(make_cuda_ops(0, Dtype::f32));
    all.push_back(make_cuda_ops(0, Dtype::bf16));
  } catch (const Error& e) {
    if (e.code() != Code::unavailable) throw;
  }
  return all;
}

}  // namespace glm53
