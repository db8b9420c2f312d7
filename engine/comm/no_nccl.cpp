// What stands in for NCCL in a build without CUDA.
#include "common/error.h"
#include "engine/comm/communicator.h"

namespace glm53 {

std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, Ops&, std::chrono::milliseconds) {
  throw Error(Code::unavailable, "NCCL is not compiled in", "build with GLM53_CUDA=ON and NCCL's nccl.h");
}

}  // namespace glm53
