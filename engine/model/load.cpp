#include "engine/model/load.h"

#include <utility>

#include "common/strings.h"
#include "engine/loader/prepared.h"
#include "engine/loader/safetensors.h"
#include "engine/loader/source.h"
#include "engine/model/model_weights.h"

namespace glm53 {
namespace {

/// Stored bytes of the tensors under a prefix; what progress is counted in.
uint64_t stored_bytes(const Checkpoint& checkpoint, std::string_view prefix) {
  uint64_t total = 0;
  const auto& tensors = checkpoint.tensors();
  for (auto it = tensors.lower_bound(prefix); it != tensors.end() && it->first.starts_with(prefix); ++it)
    total += it->second.end - it->second.begin;
  return total;
}

/// Turns "the weights under this prefix are there" into bytes of the checkpoint.
class ProgressByPart {
 public:
  ProgressByPart(const Checkpoint& checkpoint, const ModelConfig& config, const LoadProgress& progress)
      : checkpoint_(checkpoint), progress_(progress), total_(outside()) {
    for (int i = 0; i < config.layers; ++i) total_ += stored_bytes(checkpoint, layer_prefix(i));
    if (progress_) progress_(0, total_);
  }
  void operator()(std::string_view prefix) {
    done_ += prefix.empty() ? outside() : stored_bytes(checkpoint_, prefix);
    if (progress_) progress_(done_, total_);
  }

 private:
  uint64_t outside() const {
    return stored_bytes(checkpoint_, "lm_head.") + stored_bytes(checkpoint_, "model.language_model.embed_tokens.") +
           stored_bytes(checkpoint_, "model.language_model.norm.");
  }

  const Checkpoint& checkpoint_;
  const LoadProgress& progress_;
  uint64_t total_, done_ = 0;
};

/// A checkpoint whose inventory is what its configuration says, and which can be divided like that.
struct Opened {
  Opened(const std::string& dir, Shard shard)
      : config(load_model_config(dir)), checkpoint(std::make_shared<const Checkpoint>(dir)) {
    check_inventory(*checkpoint, config);
    (void)plan_shard(config, shard.rank, shard.size, has_exl3_experts(*checkpoint));
  }
  ModelConfig config;
  std::shared_ptr<const Checkpoint> checkpoint;
};

}  // namespace

std::vector<Take> plan_takes(const ModelConfig& config, Shard shard) {
  TakeRecorder recorder;
  take_weights(config, shard, recorder);
  return recorder.takes();
}

std::unique_ptr<Model> load_model(const std::string& dir, const FormatPolicy& policy, const ModelLimits& limits,
                                  Ops& ops, Communicator& comm, const LoadOptions& options,
                                  const LoadProgress& progress) {
  const Shard shard = comm.shard();
  Opened from(dir, shard);
  std::unique_ptr<WeightSource> source;
  if (options.prepared.empty()) {
    source = make_checkpoint_source(
        from.checkpoint, policy, shard, ops,
        {.check_values = options.check_values, .takes = plan_takes(from.config, shard), .read = options.read});
  } else {
    source = open_prepared(cat(options.prepared, "/", prepared_folder(shard)),
                           prepared_key(*from.checkpoint, from.config.digest, policy, shard), ops, options.read,
                           options.check_values);
  }
  ProgressByPart parts(*from.checkpoint, from.config, progress);
  return load_model(from.config, std::move(source), limits, ops, comm, [&](std::string_view prefix) { parts(prefix); });
}

std::unique_ptr<Model> load_model(const std::string& dir, const FormatPolicy& policy, const ModelLimits& limits,
                                  Ops& ops, Communicator& comm, const LoadProgress& progress) {
  return load_model(dir, policy, limits, ops, comm, LoadOptions{}, progress);
}

uint64_t prepare_weights(const std::string& dir, const FormatPolicy& policy, Shard shard, const std::string& out,
                         const LoadOptions& options, const LoadProgress& progress, FileOps& files) {
  const Opened from(dir, shard);
  const auto ops = make_cpu_ops(1);  // memory is all that is wanted of it
  const auto source = make_checkpoint_source(from.checkpoint, policy, shard, *ops,
                                             {.check_values = options.check_values,
                                              .takes = plan_takes(from.config, shard),
                                              .keep = false,
                                              .read = options.read});
  PreparedWriter writer(cat(out, "/", prepared_folder(shard)),
                        prepared_key(*from.checkpoint, from.config.digest, policy, shard), *source, files);
  ProgressByPart parts(*from.checkpoint, from.config, progress);
  take_weights(from.config, shard, writer, [&](std::string_view prefix) { parts(prefix); });
  writer.finish();
  return writer.bytes_taken();
}

}  // namespace glm53
