// The forward pass of glm5_next, written once against kernels/ops.h. It never sees a request.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/loader/config.h"
#include "kernels/batch.h"
#include "kernels/ops.h"

namespace glm53 {

struct ModelLimits {
  int max_rows = 512;  ///< rows of one step
  int max_seqs = 16;
  int max_context = 4096;  ///< tokens of one sequence
  int max_window = 16;
  int max_logit_rows = 64;
  KvFormat kv = KvFormat::f32;
  /// Layers whose outputs a drafter wants to read, in its order (ForwardOut::taps); empty costs nothing.
  std::vector<int> taps{};
};

/// Intermediate values for golden tests; filled only where the pointer is set. Called after each stage with a name such
/// as "layer3.streams", "layer3.attn.in", "mla3.selected", "norm".
using Probe = std::function<void(const std::string& name, Tensor value)>;

struct ForwardOut {
  Tensor logits;  ///< f32 [logit_rows][vocab] on rank 0, empty elsewhere; overwritten by the next forward
  Tensor hidden;  ///< act [R][H] after the final norm
  Tensor mean;    ///< act [R][H] before it: mean of the streams behind the last layer
  Tensor taps;    ///< act [R][taps·H]: means of the streams behind the layers of ModelLimits::taps; empty without
};

/// What drafters share with the model: its embedding, its head, and how it is divided. Valid as long as the model.
struct SharedWeights {
  const Weight* embedding = nullptr;  ///< [vocab][H]
  const Weight* head = nullptr;       ///< [shard.vocab][H]: this rank's part of the vocabulary, in rank order
  ShardPlan shard;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  virtual const ModelLimits& limits() const = 0;
  virtual CacheGeometry geometry() const = 0;
  virtual SharedWeights shared() const = 0;
  /// Bytes of weights on this rank, by group name, for the memory ledger.
  virtual std::vector<std::pair<std::string, size_t>> weight_bytes() const = 0;
  /// One step. Every rank of the communicator calls it with an equal batch.
  virtual ForwardOut forward(const Batch& batch, const Caches& caches) = 0;
  /// A part of a step: the batch passes through some layers and is held in front of the next one, while other batches
  /// may take whole steps. Parts of one batch follow each other from layer 0 to the last one, which gives the result;
  /// earlier ones give none. Bits are those of one whole step. A sequence of the batch may be given up on the way: slot
  /// -1 from then on.
  virtual ForwardOut forward_part(const Batch& batch, const Caches& caches, LayerSpan layers) = 0;
  /// Commits pending records of slots (before snapshots, chunk pieces after windows, preemption).
  virtual void flush(std::span<const SlotId> slots, std::span<const int> replay, const Caches& caches) = 0;
  virtual void set_probe(Probe probe) = 0;
};

using LoadProgress = std::function<void(uint64_t done, uint64_t total)>;

/// Checks the inventory, then loads this rank's part of the checkpoint in `dir`. `ops` and `comm` outlive the model.
std::unique_ptr<Model> load_model(const std::string& dir, const FormatPolicy& policy, const ModelLimits& limits,
                                  Ops& ops, Communicator& comm, const LoadProgress& progress = {});

/// Allocates pools of the given sizes for a geometry (block 0 is never used, so `blocks` must be ≥ 2).
struct PoolSizes {
  int blocks = 0, slots = 0, snaps = 0;
};
struct OwnedCaches {
  std::vector<Buffer> memory;
  Caches caches;
};
OwnedCaches make_caches(const CacheGeometry& geometry, const PoolSizes& sizes, Ops& ops);
/// Bytes of one block, slot and snapshot, for the ledger.
struct PoolUnit {
  size_t block = 0, slot = 0, snap = 0;
};
PoolUnit pool_unit(const CacheGeometry& geometry, Dtype activation);

}  // namespace glm53
