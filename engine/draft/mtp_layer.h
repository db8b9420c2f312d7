// The MTP layer's forward (spec speculative §2.2): one plain residual layer of attention and experts behind the target.
#pragma once

#include <memory>
#include <string>

#include "engine/comm/communicator.h"
#include "engine/draft/mtp.h"
#include "engine/draft/staging.h"
#include "engine/model/mla.h"
#include "engine/model/mlp.h"
#include "engine/model/weights.h"
#include "engine/model/workspace.h"

namespace glm53 {

class MtpLayer {
 public:
  /// For at most `rows` rows at a time. `weights` sees "model.language_model.layers.N.".
  MtpLayer(const WeightReader& weights, Model& target, int rows, Ops& ops, Communicator& comm);

  /// Hidden states that go in, act [rows][H]: the caller fills row i for row i of the next batch.
  Tensor hidden(int64_t row, int64_t n) const { return in_.rows(row, row + n); }
  /// Writes latents and indexer keys of the batch's rows, for rows that nothing is asked of. Tokens are those behind
  /// the rows' positions; −1 counts as a zero embedding. Only the first `rows` of hidden() are read.
  void write(const Batch& batch, const Caches& caches);
  /// The whole layer; z act [rows][H], what the head reads and what a chain goes on with. Overwritten by the next call.
  Tensor run(const Batch& batch, const Caches& caches);

 private:
  /// Input of the attention, left in the workspace: u = eh_proj · (norms of embedding and hidden state), x = norm u.
  void enter(const Step& step);
  Step step(const Batch& batch, const Caches& caches) {
    return {ops_, batch, caches, space_, no_probe_, no_probe_space_, batch.token.dim(0)};
  }

  Model& target_;
  Ops& ops_;
  Communicator& comm_;
  float eps_;
  Weight enorm_, hnorm_, eh_proj_, input_norm_, post_norm_, head_norm_;
  MlaLayer attention_;
  MoeMlp mlp_;
  TensorStore store_{ops_};
  Workspace space_;
  Tensor in_, both_, u_;  ///< act [rows][H], [rows][2H] embedding half first, [rows][H] residual
  Probe no_probe_;
  ProbeSpace no_probe_space_;
};

}  // namespace glm53
