// config.json of a DFlash2 drafter (spec speculative §1.2), and whether it fits a target.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/draft/dflash.h"
#include "engine/loader/config_fields.h"
#include "engine/loader/json_text.h"

namespace glm53 {
namespace {

// Far above any drafter of the family; below them no product of sizes overflows 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 22;
constexpr int kMaxCount = 1 << 12;

/// Settings of which one value is implemented. Defaults are those of the published drafters where a key is optional.
void refuse_unsupported(const ConfigFields& top, const ConfigFields& own, int layers) {
  const std::vector<std::string> kinds = top.texts("architectures");
  if (kinds != std::vector<std::string>{"DFlash2DraftModel"})
    top.refuse("architectures", top.shown("architectures"), "this drafter must be a DFlash2DraftModel");
  top.only_text("hidden_act", "silu");
  top.only_flag("attention_bias", false);
  top.only_flag("tie_word_embeddings", false);
  top.only_flag("is_causal", false);  // rows of a block see each other in both directions
  top.only_flag("use_sliding_window", true);
  const std::vector<std::string> types = top.texts("layer_types");
  if (types.size() != static_cast<size_t>(layers))
    top.refuse("layer_types", cat("a list of ", types.size(), " entries"),
               cat("expected num_hidden_layers = ", layers, " entries"));
  for (const std::string& type : types)
    if (type != "sliding_attention")
      top.refuse("layer_types", cat("naming \"", type, "\""), "only sliding_attention is supported");
  for (const ConfigFields& fields : {top, own}) {
    fields.only_flag("sample_from_anchor", false);
    fields.only_flag("attention_sink_bias", false);
    for (const char* scale : {"input_embedding_scale", "output_multiplier"})
      if (fields.has(scale) && fields.number_between(scale, 0, 1e6) != 1.0F)
        fields.refuse(scale, fields.shown(scale), "only 1 is supported");
    if (fields.has("final_logit_softcapping"))
      fields.refuse("final_logit_softcapping", fields.shown("final_logit_softcapping"),
                    "only its absence is supported");
  }
}

void read_dflash(const ConfigFields& own, DflashConfig& c) {
  c.block = own.small("block_size", 2, 16);
  c.mask_token = static_cast<int32_t>(own.integer("mask_token_id", 0, c.vocab - 1));
  c.tap_layers = own.indices("target_layer_ids");
  if (c.tap_layers.empty()) own.refuse("target_layer_ids", "empty", "name the target's layers that the drafter reads");
  for (const int layer : c.tap_layers)
    if (layer >= c.target_layers)
      own.refuse("target_layer_ids", own.shown("target_layer_ids"),
                 cat("layers are numbered 0 to num_target_layers − 1 = ", c.target_layers - 1));
  c.conv_kernel = own.small("conv_kernel_size", 1, 8);
  c.conv_group = own.small("conv_group_size", 1, kMaxCount);
  if (c.hidden % c.conv_group != 0)
    own.refuse("conv_group_size", std::to_string(c.conv_group), cat("must divide hidden_size = ", c.hidden));
  c.selector_rank = own.small("selector_rank", 1, kMaxCount);
  c.selector_top_k = own.small("selector_top_k", 1, 64);
}

}  // namespace

DflashConfig parse_dflash_config(const std::string& json_text, const std::string& where) {
  const nlohmann::json json = parse_json_object(json_text, where, Code::config);
  const ConfigFields top(json, where, "a DFlash2 drafter");
  DflashConfig c;
  c.vocab = top.integer("vocab_size", 1, kMaxWidth);
  c.hidden = top.integer("hidden_size", 1, kMaxWidth);
  c.intermediate = top.integer("intermediate_size", 1, kMaxWidth);
  c.layers = top.small("num_hidden_layers", 1, kMaxCount);
  c.heads = top.small("num_attention_heads", 1, kMaxCount);
  c.kv_heads = top.small("num_key_value_heads", 1, c.heads);
  if (c.heads % c.kv_heads != 0)
    top.refuse("num_key_value_heads", std::to_string(c.kv_heads), cat("must divide num_attention_heads = ", c.heads));
  c.head_dim = top.small("head_dim", 2, kMaxCount);
  if (c.head_dim % 2 != 0) top.refuse("head_dim", std::to_string(c.head_dim), "must be even: RoPE turns its halves");
  c.target_layers = top.small("num_target_layers", 1, kMaxCount);
  c.window = top.small("sliding_window", 1, 1 << 20);
  c.rms_eps = top.number_between("rms_norm_eps", 0, 1);
  // Nested only: a default here would be a drafter that works and drafts nonsense.
  const ConfigFields rope = top.object("rope_parameters");
  if (rope.text("rope_type") != "default")
    rope.refuse("rope_type", rope.shown("rope_type"), "only \"default\" is supported");
  c.rope_theta = static_cast<double>(rope.number_between("rope_theta", 1, 1e12));
  const ConfigFields own = top.object("dflash_config");
  refuse_unsupported(top, own, c.layers);
  read_dflash(own, c);
  c.digest = sha256_hex(json_text);
  return c;
}

DflashConfig load_dflash_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  constexpr size_t kLargest = size_t{1} << 20;
  return parse_dflash_config(read_file(path, kLargest), path);
}

void check_dflash_fits(const DflashConfig& d, const ModelConfig& target) {
  std::vector<std::string> reasons;
  const auto same = [&](std::string_view field, int64_t found, std::string_view of_target, int64_t wanted) {
    if (found != wanted) reasons.push_back(cat(field, " is ", found, ", the target's ", of_target, " is ", wanted));
  };
  same("hidden_size", d.hidden, "hidden_size", target.hidden);
  same("vocab_size", d.vocab, "vocab_size", target.vocab);
  same("num_target_layers", d.target_layers, "num_hidden_layers", target.layers);
  for (const int layer : d.tap_layers)
    if (layer >= target.layers)
      reasons.push_back(cat("target_layer_ids names layer ", layer, ", the target's last is ", target.layers - 1));
  if (d.mask_token >= target.vocab)
    reasons.push_back(cat("mask_token_id is ", d.mask_token, ", the target's vocabulary ends at ", target.vocab - 1));
  if (!reasons.empty())
    throw Error(Code::config, cat("this drafter is not made for this target: ", join(reasons, "; ")),
                "use the drafter that was trained for the target");
}

}  // namespace glm53
