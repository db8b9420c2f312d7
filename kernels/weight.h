// Weights: a format is a property of the weight, never of the call site.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/tensor.h"

namespace glm53 {

class Ops;

enum class WeightFormat : uint8_t { f32, bf16, fp8_row, fp8_g128, int4_g32, exl3 };
/// Which part of the model a weight belongs to; the unit in which a FormatPolicy speaks.
enum class WeightGroup : uint8_t {
  kda_in,
  kda_out,
  mla,
  indexer,
  shared_expert,
  dense_mlp,
  routed_expert,
  head,
  drafter,
  exact
};
inline constexpr int kWeightGroups = 10;

/// EXL3 codebooks (spec exl3 §2).
enum class Codebook : uint32_t { three_inst = 0, mcg = 1, mul1 = 2 };

/// A linear map y[out] = W x[in], or a plain tensor (norm weights, biases: out = elements, in = 1).
struct Weight {
  WeightFormat format{};
  int64_t out = 0, in = 0;
  /// f32/bf16: [out, in] row-major (conv1d [C,1,4] arrives as [C,4]). exl3: i16 [in/16, out/16, 16·bits]. fp8_row: e4m3
  /// [out, in]; int4_g32: u8 [out, in/2]; both permuted inside 32 inputs (kernels/quantise.h).
  Tensor codes;
  Tensor scales;    ///< fp8_row f32 [out]; int4_g32 bf16 [out, in/32]; fp8_g128 f32 [out/128, in/128] (no operator yet)
  Tensor suh, svh;  ///< exl3: f16 [in], f16 [out]
  int bits = 0;     ///< exl3: bits per weight, 1 … 8
  Codebook codebook = Codebook::mcg;
  bool empty() const { return out == 0; }
};

/// Format of each group, from config; `exact` is always f32 or bf16 as stored.
struct FormatPolicy {
  std::array<WeightFormat, kWeightGroups> of_group;
  /// Everything as stored in the checkpoint (bf16, f32, exl3).
  static FormatPolicy as_stored();
  WeightFormat of(WeightGroup g) const { return of_group[static_cast<size_t>(g)]; }
};

/// One rank's part of a tensor-parallel group.
struct Shard {
  int rank = 0, size = 1;
};

/// How the rows or columns of a weight are divided.
enum class Split : int8_t {
  none = -1,    ///< replicated
  rows = 0,     ///< output features (dimension 0 of [out, in])
  columns = 1,  ///< input features; the result is a partial sum
};

/// One tensor of a stack: matrices over the same input put on top of each other, so that one product serves all.
struct StackPart {
  std::string name;
  Split split = Split::none;  ///< none or rows
};

/// Gives out weights in the format of the policy and cut for one shard: from a checkpoint (slice and convert) or from a
/// prepared folder. The memory of a Weight belongs to the source and lives as long as it.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// `name` is the tensor's full name in the checkpoint; for an EXL3 linear the name without ".weight" or ".trellis"
  /// suffix works too. Throws Error(weights) when it is missing, or the shard's cut is not allowed (EXL3 and quantised
  /// formats: multiples of 128).
  virtual Weight take(std::string_view name, WeightGroup group, Split split) = 0;
  /// The rows of several plain (f32 or bf16) tensors of one width and dtype as one weight, in the given order, each cut
  /// as it says.
  virtual Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) = 0;
  virtual bool has(std::string_view name) const = 0;
  /// Digest of sources, policy, shard and layout version; the key of a prepared folder.
  virtual std::string digest() const = 0;
  /// Bytes handed out so far, and in all, for progress.
  virtual uint64_t bytes_taken() const = 0;
};

/// Opens a checkpoint folder (model.safetensors, or shards with an index). Implemented in engine/loader.
std::unique_ptr<WeightSource> open_checkpoint(const std::string& dir, const FormatPolicy& policy, Shard shard,
                                              Ops& ops);

}  // namespace glm53
