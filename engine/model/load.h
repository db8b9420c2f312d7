// Loading a model's weights from any source: a checkpoint, a prepared folder, a generator; and preparing a folder.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/file.h"
#include "engine/loader/block_reader.h"
#include "engine/loader/take.h"
#include "engine/model/model.h"
#include "kernels/weight.h"

namespace glm53 {

/// Called with the prefix of names whose weights have all been taken: "" for embedding, final norm and head, then
/// "model.language_model.layers.0." and so on.
using PartLoaded = std::function<void(std::string_view prefix)>;

/// A model with the weights of a source, which cuts for comm.shard() and which the model keeps. `ops` and `comm`
/// outlive the model. Throws Error(config) where the ranks do not divide the model, and what the source throws.
std::unique_ptr<Model> load_model(ModelConfig config, std::unique_ptr<WeightSource> source, const ModelLimits& limits,
                                  Ops& ops, Communicator& comm, const PartLoaded& loaded = {});

struct LoadOptions {
  bool check_values = false;  ///< refuse values that are not finite, naming layer and tensor
  std::string prepared{};     ///< folder of prepared weights, with one folder a rank; empty: cut and convert
  ReadOptions read{};
};
/// As load_model of model.h. Throws Error(weights) with the reason where prepared weights are not those of this
/// checkpoint, these formats and this rank.
std::unique_ptr<Model> load_model(const std::string& dir, const FormatPolicy& policy, const ModelLimits& limits,
                                  Ops& ops, Communicator& comm, const LoadOptions& options,
                                  const LoadProgress& progress = {});

/// Writes the weights of one rank into its folder inside `out` (engine/loader/prepared.h), a crash leaves it
/// unfinished, which a load says. Returns their bytes.
uint64_t prepare_weights(const std::string& dir, const FormatPolicy& policy, Shard shard, const std::string& out,
                         const LoadOptions& options = {}, const LoadProgress& progress = {},
                         FileOps& files = FileOps::real());

/// What a load takes on a rank, in order.
std::vector<Take> plan_takes(const ModelConfig& config, Shard shard);

/// Takes from `source` what a model of this configuration takes on that rank, in the same order, and keeps nothing.
void take_weights(const ModelConfig& config, Shard shard, WeightSource& source, const PartLoaded& loaded = {});

}  // namespace glm53
