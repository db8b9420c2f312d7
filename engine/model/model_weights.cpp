#include "engine/model/model_weights.h"

#include "common/strings.h"

namespace glm53 {
namespace {

constexpr std::string_view kText = "model.language_model.";

std::variant<KdaLayer, MlaLayer> load_attention(const WeightReader& layer, const ModelConfig& c, const ShardPlan& shard,
                                                int i) {
  const WeightReader weights = layer.under("self_attn.");
  const auto at = static_cast<size_t>(i);
  if (c.attention[at] == AttentionKind::kda) return KdaLayer(weights, c, shard, i, c.kind_index(i));
  return MlaLayer(weights, c, shard, i, c.kind_index(i), c.shared_indexer[at]);
}

std::variant<SwigluMlp, MoeMlp> load_mlp(const WeightReader& layer, const ModelConfig& c, int i) {
  const WeightReader weights = layer.under("mlp.");
  if (c.mlp[static_cast<size_t>(i)] == MlpKind::dense)
    return SwigluMlp(weights, WeightGroup::dense_mlp, c.swiglu_limit);
  return MoeMlp(weights, c, i);
}

void tell(const PartLoaded& loaded, std::string_view prefix) {
  if (loaded) loaded(prefix);
}

}  // namespace

std::string layer_prefix(int number) {
  return cat(kText, "layers.", number, ".");
}

Site::Site(const WeightReader& layer, std::string_view site, std::string_view norm_name)
    : fn(layer.take(cat("hc_", site, "_fn"), WeightGroup::exact)),
      base(layer.take(cat("hc_", site, "_base"), WeightGroup::exact)),
      scale(layer.take(cat("hc_", site, "_scale"), WeightGroup::exact)),
      norm(layer.take(cat(norm_name, ".weight"), WeightGroup::exact)) {}

Layer::Layer(const WeightReader& layer, const ModelConfig& config, const ShardPlan& shard, int number)
    : attention_site(layer, "attn", "input_layernorm"),
      mlp_site(layer, "ffn", "post_attention_layernorm"),
      attention(load_attention(layer, config, shard, number)),
      mlp(load_mlp(layer, config, number)) {}

OuterWeights::OuterWeights(WeightSource& source, WeightLedger& ledger)
    : embed(WeightReader(source, ledger, std::string(kText)).take("embed_tokens.weight", WeightGroup::exact)),
      norm(WeightReader(source, ledger, std::string(kText)).take("norm.weight", WeightGroup::exact)),
      head(WeightReader(source, ledger, "").take("lm_head.weight", WeightGroup::head, Split::rows)) {}

ModelWeights::ModelWeights(const ModelConfig& config, const ShardPlan& shard, WeightSource& source,
                           WeightLedger& ledger, const PartLoaded& loaded)
    : outer(source, ledger) {
  tell(loaded, "");
  layers.reserve(static_cast<size_t>(config.layers));
  for (int i = 0; i < config.layers; ++i) {
    layers.emplace_back(WeightReader(source, ledger, layer_prefix(i)), config, shard, i);
    tell(loaded, layer_prefix(i));
  }
}

void take_weights(const ModelConfig& config, Shard shard, WeightSource& source, const PartLoaded& loaded) {
  const ShardPlan plan = plan_shard(config, shard.rank, shard.size, false);
  WeightLedger ledger;
  (void)OuterWeights(source, ledger);
  tell(loaded, "");
  for (int i = 0; i < config.layers; ++i) {
    (void)Layer(WeightReader(source, ledger, layer_prefix(i)), config, plan, i);
    tell(loaded, layer_prefix(i));
  }
}

}  // namespace glm53
