// The target's output head as drafters use it: the best candidates of each row, the same on every rank.
#pragma once

#include <cstdint>

#include "engine/comm/communicator.h"
#include "engine/draft/staging.h"
#include "engine/model/model.h"
#include "kernels/draft_ops.h"

namespace glm53 {

class TargetHead {
 public:
  /// For at most `rows` rows and the `k` best of each.
  TargetHead(const SharedWeights& target, Ops& ops, Communicator& comm, int64_t rows, int k);
  struct Best {
    Tensor value, id;  ///< f32, i32 [L][k], descending; ties to the lower id
  };
  /// z act [L][H]. The vocabulary is divided: each rank finds its own best, then all look at everybody's.
  Best best(const Tensor& z);

 private:
  SharedWeights target_;
  Ops& ops_;
  Communicator& comm_;
  int k_;
  TensorStore store_{ops_};
  Tensor logits_, value_, id_, all_value_, all_id_, best_value_, best_id_;
};

}  // namespace glm53
