// Prepared weights: one rank's weights in their final formats and cuts, in the order in which a load takes them.
//
// A folder holds two files. `weights`: the tensors one behind the other, each on a multiple of 256 bytes.
// `manifest.json`: what the folder was made from, the takes in order with formats, shapes and places, an XXH3 of each 4
// MiB of `weights`, and a SHA-256 of the manifest itself. The manifest is written last; a folder without one is
// unfinished.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/loader/block_reader.h"
#include "engine/loader/safetensors.h"
#include "engine/loader/take.h"
#include "kernels/ops.h"
#include "kernels/weight.h"

namespace glm53 {

/// What decides the bytes of a prepared folder.
struct PreparedKey {
  std::string config;      ///< digest of config.json
  std::string checkpoint;  ///< digest of the index and headers
  std::string sample;      ///< digest of some bytes of the tensors: headers alone are equal after an edit of weights
  FormatPolicy formats = FormatPolicy::as_stored();
  Shard shard;
};
/// Reads a few thousand places of the checkpoint.
PreparedKey prepared_key(const Checkpoint& checkpoint, const std::string& config_digest, const FormatPolicy& formats,
                         Shard shard);
/// "rank0of2", the folder of a rank inside the one that the configuration names.
std::string prepared_folder(Shard shard);

/// A source that passes on what another one gives, and writes it down. `from` gives host memory, and outlives it.
class PreparedWriter final : public WeightSource {
 public:
  /// Makes the folder; what an earlier preparation left there is invalid from now on. Throws Error(unavailable).
  PreparedWriter(std::string dir, PreparedKey key, WeightSource& from, FileOps& ops = FileOps::real());
  PreparedWriter(const PreparedWriter&) = delete;
  PreparedWriter& operator=(const PreparedWriter&) = delete;
  ~PreparedWriter() override;

  Weight take(std::string_view name, WeightGroup group, Split split) override;
  Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) override;
  bool has(std::string_view name) const override { return from_.has(name); }
  std::string digest() const override { return from_.digest(); }
  uint64_t bytes_taken() const override { return from_.bytes_taken(); }
  /// Everything is on the disk when this returns; without it the folder stays unfinished.
  void finish();

 private:
  struct Impl;
  WeightSource& from_;
  std::unique_ptr<Impl> impl_;
};

/// Opens a rank's folder and reads it from its begin to its end. Throws Error(weights) with the reason and what to do
/// when it is missing, unfinished, damaged, or not what `key` says; damage inside `weights` shows when the weight is
/// taken. `ops` outlives the source.
std::unique_ptr<WeightSource> open_prepared(const std::string& dir, const PreparedKey& key, Ops& ops,
                                            const ReadOptions& options = {}, bool check_values = false);

}  // namespace glm53
