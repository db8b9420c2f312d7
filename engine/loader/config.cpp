#include "engine/loader/config.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/loader/config_fields.h"
#include "engine/loader/json_text.h"
#include "kernels/batch.h"

namespace glm53 {
namespace {

// Limits far above any model of the family; below them no product of sizes overflows 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 22;
constexpr int kMaxCount = 1 << 16;
constexpr int kMaxLayers = 1024;

/// Settings that the forward pass does not read because it implements one value of each.
void refuse_unsupported(const ConfigFields& top, const ConfigFields& text) {
  text.only_text("hidden_act", "silu");
  text.only_text("scoring_func", "sigmoid");
  text.only_text("topk_method", "noaux_tc");
  text.only_text("moe_router_dtype", "float32");
  text.only_text("dtype", "bfloat16");
  text.only_text("torch_dtype", "bfloat16");
  text.only_flag("attention_bias", false);
  text.only_flag("tie_word_embeddings", false);
  top.only_flag("tie_word_embeddings", false);
  text.only_flag("mla_use_nope", true);
  text.only_flag("mhc", true);
  text.only_flag("index_kpool_compress", true);
  text.only_flag("index_kpool_always_select_tail", true);
  text.only_integer("qk_rope_head_dim", 0);
  text.only_integer("moe_layer_freq", 1);
  if (top.has("quantization_config")) {
    const ConfigFields quantization = top.object("quantization_config");
    if (quantization.text("quant_method") != "exl3")
      quantization.refuse("quant_method", quantization.shown("quant_method"),
                          "only \"exl3\" or an unquantised BF16 checkpoint is supported");
  }
}

void check_length(const ConfigFields& fields, std::string_view field, size_t found, int layers) {
  if (found != static_cast<size_t>(layers))
    fields.refuse(field, cat("a list of ", found, " entries"),
                  cat("expected num_hidden_layers = ", layers, " entries"));
}

/// Attention kinds from linear_attn_config.{kda,full_attn}_layers, which say the same as layer_types.
std::vector<AttentionKind> kinds_of_lists(const ConfigFields& linear, int layers) {
  std::vector<int> owner(static_cast<size_t>(layers), -1);
  const auto claim = [&](std::string_view field, int kind) {
    for (const int layer : linear.indices(field)) {
      if (layer >= layers) linear.refuse(field, linear.shown(field), cat("layers are numbered 0 to ", layers - 1));
      int& slot = owner[static_cast<size_t>(layer)];
      if (slot != -1) linear.refuse(field, cat("naming layer ", layer, " a second time"), "name every layer once");
      slot = kind;
    }
  };
  claim("kda_layers", 0);
  claim("full_attn_layers", 1);
  std::vector<AttentionKind> kinds;
  for (const int kind : owner) {
    if (kind == -1)
      linear.refuse("kda_layers", cat("without layer ", kinds.size()), "name every layer in it or in full_attn_layers");
    kinds.push_back(kind == 0 ? AttentionKind::kda : AttentionKind::mla);
  }
  return kinds;
}

void read_attention_kinds(const ConfigFields& text, const ConfigFields& linear, ModelConfig& c) {
  const bool lists = linear.has("kda_layers") || linear.has("full_attn_layers");
  if (!text.has("layer_types") && lists) {
    c.attention = kinds_of_lists(linear, c.layers);
    return;
  }
  const std::vector<std::string> types = text.texts("layer_types");
  check_length(text, "layer_types", types.size(), c.layers);
  for (const std::string& type : types) {
    if (type != "linear_attention" && type != "deepseek_sparse_attention")
      text.refuse("layer_types", cat("naming \"", type, "\""),
                  "supported: linear_attention, deepseek_sparse_attention");
    c.attention.push_back(type == "linear_attention" ? AttentionKind::kda : AttentionKind::mla);
  }
  if (lists && kinds_of_lists(linear, c.layers) != c.attention)
    linear.refuse("kda_layers", linear.shown("kda_layers"), "layer_types says otherwise; both must agree");
}

void read_mlp_kinds(const ConfigFields& text, ModelConfig& c) {
  const auto dense = text.integer_or("first_k_dense_replace", 0, c.layers, -1);
  if (!text.has("mlp_layer_types")) {
    if (dense < 0) (void)text.texts("mlp_layer_types");  // says that it is missing
    for (int i = 0; i < c.layers; ++i) c.mlp.push_back(i < dense ? MlpKind::dense : MlpKind::sparse);
    return;
  }
  const std::vector<std::string> types = text.texts("mlp_layer_types");
  check_length(text, "mlp_layer_types", types.size(), c.layers);
  for (const std::string& type : types) {
    if (type != "dense" && type != "sparse")
      text.refuse("mlp_layer_types", cat("naming \"", type, "\""), "supported: dense, sparse");
    c.mlp.push_back(type == "dense" ? MlpKind::dense : MlpKind::sparse);
  }
}

/// Entries of KDA layers mean nothing. A shared indexer needs the selection of the MLA layer directly before it.
void read_indexer_kinds(const ConfigFields& text, ModelConfig& c) {
  c.shared_indexer.assign(static_cast<size_t>(c.layers), false);
  if (!text.has("indexer_types")) return;
  const std::vector<std::string> types = text.texts("indexer_types");
  check_length(text, "indexer_types", types.size(), c.layers);
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "full" && types[i] != "shared")
      text.refuse("indexer_types", cat("naming \"", types[i], "\""), "supported: full, shared");
    if (c.attention[i] != AttentionKind::mla || types[i] == "full") continue;
    if (i == 0 || c.attention[i - 1] != AttentionKind::mla)
      text.refuse("indexer_types",
                  cat("\"shared\" for layer ", i, i == 0 ? ", the first" : ", which follows a KDA layer"),
                  "a shared indexer must directly follow a sparse-attention layer");
    c.shared_indexer[i] = true;
  }
}

void read_moe(const ConfigFields& text, ModelConfig& c) {
  c.intermediate = text.integer("intermediate_size", 1, kMaxWidth);
  c.moe_intermediate = text.integer("moe_intermediate_size", 1, kMaxWidth);
  c.experts = text.small("n_routed_experts", 1, kMaxCount);
  c.shared_experts = text.small("n_shared_experts", 1, 64);
  c.experts_per_token = text.small("num_experts_per_tok", 1, c.experts);
  c.groups = static_cast<int>(text.integer_or("n_group", 1, c.experts, 1));
  c.top_groups = static_cast<int>(text.integer_or("topk_group", 1, c.groups, 1));
  c.norm_topk = text.flag_or("norm_topk_prob", true);
  c.routed_scale = text.number_between("routed_scaling_factor", 0, 1e6);
  c.swiglu_limit = text.number_between("swiglu_limit", 0, 1e30);
  if (c.groups == 1) return;
  const int group = c.experts / c.groups;
  if (c.experts % c.groups != 0 || group < 2)
    text.refuse("n_group", std::to_string(c.groups),
                cat("must divide n_routed_experts = ", c.experts, " into groups of two or more"));
  if (c.experts_per_token > group * c.top_groups)
    text.refuse("num_experts_per_tok", std::to_string(c.experts_per_token),
                cat("topk_group = ", c.top_groups, " groups hold only ", group * c.top_groups, " experts"));
}

void read_mla(const ConfigFields& text, ModelConfig& c) {
  c.heads = text.small("num_attention_heads", 1, kMaxCount);
  text.only_integer("num_key_value_heads", c.heads);
  c.q_lora = text.small("q_lora_rank", 1, kMaxCount);
  c.kv_lora = text.small("kv_lora_rank", 1, kMaxCount);
  c.nope = text.small("qk_nope_head_dim", 1, kMaxCount);
  c.v_dim = text.small("v_head_dim", 1, kMaxCount);
  c.index_heads = text.small("index_n_heads", 1, kMaxCount);
  c.index_dim = text.small("index_head_dim", 1, kMaxCount);
  c.index_topk = text.small("index_topk", 1, 1 << 24);
  c.kpool = text.small("index_kpool", 1, kBlockTokens);
  if (kBlockTokens % c.kpool != 0)
    text.refuse("index_kpool", std::to_string(c.kpool),
                cat("must divide the cache block of ", kBlockTokens, " tokens"));
  if (c.index_topk % c.kpool != 0)
    text.refuse("index_topk", std::to_string(c.index_topk), cat("must be a multiple of index_kpool = ", c.kpool));
}

void read_kda(const ConfigFields& linear, ModelConfig& c) {
  c.kda_heads = linear.small("num_heads", 1, kMaxCount);
  c.kda_dim = linear.small("head_dim", 1, kMaxCount);
  c.conv_kernel = linear.small("short_conv_kernel_size", 1, kMaxCount);
  linear.only_integer("short_conv_kernel_size", 4);
  linear.only_flag("safe_gate", true);
  c.gate_lower_bound = linear.number_between("gate_lower_bound", -5.5, 0);
}

void read_tokens(const ConfigFields& top, const ConfigFields& text, ModelConfig& c) {
  const ConfigFields& eos = text.has("eos_token_id") ? text : top;
  const nlohmann::json* value = eos.raw("eos_token_id");
  if (value != nullptr && value->is_array()) {
    for (const int id : eos.indices("eos_token_id")) c.eos.push_back(id);
  } else {
    c.eos.push_back(eos.small("eos_token_id", 0, 1 << 30));
  }
  for (const int32_t id : c.eos)
    if (id >= c.vocab)
      eos.refuse("eos_token_id", eos.shown("eos_token_id"), cat("ids must be below vocab_size = ", c.vocab));
  if (c.eos.empty()) eos.refuse("eos_token_id", "an empty list", "name at least one end token");
  const ConfigFields& pad = text.has("pad_token_id") ? text : top;
  c.pad = static_cast<int32_t>(pad.integer_or("pad_token_id", 0, c.vocab - 1, c.eos.front()));
}

}  // namespace

int ModelConfig::mla_layers() const {
  return static_cast<int>(std::count(attention.begin(), attention.end(), AttentionKind::mla));
}
int ModelConfig::kda_layers() const {
  return layers - mla_layers();
}
int ModelConfig::kind_index(int layer) const {
  const auto end = attention.begin() + layer;
  return static_cast<int>(std::count(attention.begin(), end, *end));
}
float ModelConfig::attention_scale() const {
  return 1.0f / std::sqrt(static_cast<float>(nope));
}

ModelConfig parse_model_config(const std::string& json_text, const std::string& where) {
  const nlohmann::json json = parse_json_object(json_text, where, Code::config);
  const ConfigFields top(json, where);
  if (top.text("model_type") != "glm5_next")
    top.refuse("model_type", top.shown("model_type"), "only \"glm5_next\" is supported");
  const ConfigFields text = top.object("text_config");
  text.only_text("model_type", "glm5_next_text");
  refuse_unsupported(top, text);

  ModelConfig c;
  c.vocab = text.integer("vocab_size", 1, kMaxWidth);
  c.hidden = text.integer("hidden_size", 1, kMaxWidth);
  c.layers = text.small("num_hidden_layers", 1, kMaxLayers);
  c.mtp_layers = static_cast<int>(text.integer_or("num_nextn_predict_layers", 0, 16, 0));
  c.rms_eps = text.number_between("rms_norm_eps", 0, 1);
  c.streams = text.small("hc_mult", 1, 16);
  c.sinkhorn = text.small("hc_sinkhorn_iters", 1, 1000);
  c.hc_eps = text.number_between("hc_eps", 0, 1);
  c.max_positions = text.integer("max_position_embeddings", 1, int64_t{1} << 30);
  const ConfigFields linear = text.object("linear_attn_config");
  read_attention_kinds(text, linear, c);
  read_mlp_kinds(text, c);
  read_indexer_kinds(text, c);
  read_moe(text, c);
  read_mla(text, c);
  read_kda(linear, c);
  read_tokens(top, text, c);
  c.has_vision = top.has("vision_config");
  c.digest = sha256_hex(json_text);
  return c;
}

ModelConfig load_model_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  constexpr size_t kLargest = size_t{1} << 26;
  return parse_model_config(read_file(path, kLargest), path);
}

}  // namespace glm53
