// Typed config.json of a glm5_next checkpoint. Every size of the model comes from here; nothing is hard-coded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace glm53 {

enum class AttentionKind : uint8_t { kda, mla };
enum class MlpKind : uint8_t { dense, sparse };

/// Text model of a checkpoint (spec model §1, §1.2). Names follow config.json where they are clear.
struct ModelConfig {
  int64_t vocab = 0, hidden = 0;
  int layers = 0, mtp_layers = 0;
  std::vector<AttentionKind> attention;  ///< per backbone layer
  std::vector<MlpKind> mlp;              ///< per backbone layer
  std::vector<bool> shared_indexer;      ///< per backbone layer: reuses the selection of layer i-1
  float rms_eps = 0, swiglu_limit = 0;
  int64_t intermediate = 0, moe_intermediate = 0;
  int experts = 0, shared_experts = 0, experts_per_token = 0, groups = 1, top_groups = 1;
  bool norm_topk = true;
  float routed_scale = 1;
  int heads = 0, q_lora = 0, kv_lora = 0, nope = 0, v_dim = 0;
  int index_heads = 0, index_dim = 0, index_topk = 0, kpool = 0;
  int kda_heads = 0, kda_dim = 0, conv_kernel = 0;
  float gate_lower_bound = 0;
  int streams = 0, sinkhorn = 0;
  float hc_eps = 0;
  int64_t max_positions = 0;
  std::vector<int32_t> eos;
  int32_t pad = 0;
  bool has_vision = false;
  std::string digest;  ///< sha256 of the file's bytes

  int mla_layers() const;
  int kda_layers() const;
  /// Index of layer i among the layers of its kind.
  int kind_index(int layer) const;
  int top_pools() const { return index_topk / kpool; }
  float attention_scale() const;
};

/// Parses text of a config.json. Throws Error(config) naming the field, what it holds and what is supported.
ModelConfig parse_model_config(const std::string& json_text, const std::string& where);
ModelConfig load_model_config(const std::string& dir);

/// What rank r of n keeps of each divided dimension. Throws Error(config) with the reason when n does not divide the
/// model.
struct ShardPlan {
  int rank = 0, size = 1;
  int kda_heads = 0, heads = 0;
  int64_t intermediate = 0, moe_intermediate = 0, shared_intermediate = 0, vocab = 0;
};
/// `exl3`: routed experts are packed, so their cut must fall on multiples of 128.
ShardPlan plan_shard(const ModelConfig& config, int rank, int size, bool exl3);

}  // namespace glm53
