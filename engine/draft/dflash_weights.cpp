#include "engine/draft/dflash_weights.h"

#include <algorithm>
#include <set>
#include <utility>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using Shape = std::vector<int64_t>;

std::string text(const Shape& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += cat(i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

/// Every tensor with its shape.
std::vector<std::pair<std::string, Shape>> tensors_of(const DflashConfig& c) {
  const int64_t h = c.hidden, dim = c.head_dim, q = dim * c.heads, kv = dim * c.kv_heads, mlp = c.intermediate;
  const int64_t deltas = int64_t{2} * c.conv_kernel * (h / c.conv_group);
  std::vector<std::pair<std::string, Shape>> all = {
      {"fc.weight", {h, static_cast<int64_t>(c.tap_layers.size()) * h}},
      {"hidden_norm.weight", {h}},
      {"norm.weight", {h}},
      {"candidate_selector.hidden_projection.weight", {c.selector_rank, h}},
      {"candidate_selector.predecessor_codebook", {c.vocab, c.selector_rank}},
      {"candidate_selector.successor_codebook", {c.vocab, c.selector_rank}}};
  for (int i = 0; i < c.layers; ++i) {
    const std::pair<const char*, Shape> own[] = {{"input_layernorm.weight", {h}},
                                                 {"post_attention_layernorm.weight", {h}},
                                                 {"self_attn.q_proj.weight", {q, h}},
                                                 {"self_attn.k_proj.weight", {kv, h}},
                                                 {"self_attn.v_proj.weight", {kv, h}},
                                                 {"self_attn.o_proj.weight", {h, q}},
                                                 {"self_attn.q_norm.weight", {dim}},
                                                 {"self_attn.k_norm.weight", {dim}},
                                                 {"mlp.gate_proj.weight", {mlp, h}},
                                                 {"mlp.up_proj.weight", {mlp, h}},
                                                 {"mlp.down_proj.weight", {h, mlp}},
                                                 {"attention_conv.base_kernel", {2, c.conv_kernel, h}},
                                                 {"attention_conv.kernel_projection.weight", {deltas, h}},
                                                 {"mlp_conv.base_kernel", {2, c.conv_kernel, h}},
                                                 {"mlp_conv.kernel_projection.weight", {deltas, h}}};
    for (const auto& [name, shape] : own) all.emplace_back(cat("layers.", i, ".", name), shape);
  }
  return all;
}

/// Names under which a tensor may be stored, the published one first.
std::vector<std::string> spellings(const std::string& name) {
  std::vector<std::string> all = {name, "model." + name};
  if (name == "fc.weight") all.emplace_back("encoder.fc.weight");
  if (name == "hidden_norm.weight") all.emplace_back("encoder.output_norm_enc.weight");
  return all;
}

/// Copies of the target's embedding and tables that are computed here.
bool not_needed(std::string_view stored) {
  return stored.ends_with("embed_tokens.weight") || stored.ends_with("rotary_emb.inv_freq");
}

}  // namespace

DflashShard plan_dflash_shard(const DflashConfig& config, Shard shard) {
  std::vector<std::string> reasons;
  const auto part = [&](std::string_view what, int64_t whole) {
    if (whole % shard.size != 0) reasons.push_back(cat(what, " = ", whole, " is not a multiple of ", shard.size));
    return whole / shard.size;
  };
  DflashShard plan;
  plan.heads = static_cast<int>(part("num_attention_heads", config.heads));
  plan.kv_heads = static_cast<int>(part("num_key_value_heads", config.kv_heads));
  plan.intermediate = part("intermediate_size", config.intermediate);
  if (!reasons.empty())
    throw Error(Code::config, cat("this drafter cannot be divided among ", shard.size, " ranks: ", join(reasons, "; ")),
                "use a number of ranks that divides all of these");
  return plan;
}

std::map<std::string, std::string> check_dflash_inventory(const Checkpoint& checkpoint, const DflashConfig& config) {
  constexpr size_t kMaxFindings = 100;
  std::vector<std::string> findings;
  std::map<std::string, std::string> names;
  std::set<std::string, std::less<>> claimed;
  for (const auto& [name, shape] : tensors_of(config)) {
    for (const std::string& spelling : spellings(name)) {
      if (!checkpoint.has(spelling)) continue;
      claimed.insert(spelling);
      if (!names.try_emplace(name, spelling).second)
        findings.push_back(cat(name, ": stored twice, as ", spelling, " too"));
    }
    const auto at = names.find(name);
    if (at == names.end()) {
      findings.push_back(cat(name, ": found nothing, expected ", text(shape)));
      continue;
    }
    const TensorInfo& info = checkpoint.info(at->second);
    if ((info.dtype != Dtype::bf16 && info.dtype != Dtype::f32) || info.shape != shape)
      findings.push_back(cat(at->second, ": found ", glm53::name(info.dtype), " ", text(info.shape),
                             ", expected bf16 or f32 ", text(shape)));
  }
  for (const auto& [stored, info] : checkpoint.tensors())
    if (!claimed.contains(stored) && !not_needed(stored))
      findings.push_back(
          cat(stored, ": found ", text(info.shape), ", a DFlash2 drafter of this config has no such tensor"));
  if (findings.empty()) return names;
  const size_t count = findings.size();
  findings.resize(std::min(count, kMaxFindings));
  throw Error(Code::weights,
              cat("the drafter in ", checkpoint.dir(), " has ", count, " wrong tensors:\n  ", join(findings, "\n  ")),
              "config.json and weights must be of the same drafter");
}

DflashWeights load_dflash_weights(const std::map<std::string, std::string>& names, const DflashConfig& config,
                                  WeightSource& source, WeightLedger& ledger) {
  const WeightReader reader(source, ledger, "");
  const auto take = [&](const std::string& name, WeightGroup group, Split split = Split::none) {
    return reader.take(names.at(name), group, split);
  };
  using enum WeightGroup;
  DflashWeights w;
  w.fc = take("fc.weight", drafter);
  w.hidden_norm = take("hidden_norm.weight", exact);
  w.norm = take("norm.weight", exact);
  w.selector_hidden = take("candidate_selector.hidden_projection.weight", exact);
  w.predecessor = take("candidate_selector.predecessor_codebook", exact);
  w.successor = take("candidate_selector.successor_codebook", exact);
  for (int i = 0; i < config.layers; ++i) {
    const auto own = [&](const char* name, WeightGroup group, Split split = Split::none) {
      return take(cat("layers.", i, ".", name), group, split);
    };
    DflashLayer l;
    l.input_norm = own("input_layernorm.weight", exact);
    l.post_norm = own("post_attention_layernorm.weight", exact);
    l.q = own("self_attn.q_proj.weight", drafter, Split::rows);
    l.k = own("self_attn.k_proj.weight", drafter, Split::rows);
    l.v = own("self_attn.v_proj.weight", drafter, Split::rows);
    l.o = own("self_attn.o_proj.weight", drafter, Split::columns);
    l.q_norm = own("self_attn.q_norm.weight", exact);
    l.k_norm = own("self_attn.k_norm.weight", exact);
    l.gate = own("mlp.gate_proj.weight", drafter, Split::rows);
    l.up = own("mlp.up_proj.weight", drafter, Split::rows);
    l.down = own("mlp.down_proj.weight", drafter, Split::columns);
    l.attention_conv = {own("attention_conv.base_kernel", exact),
                        own("attention_conv.kernel_projection.weight", drafter)};
    l.mlp_conv = {own("mlp_conv.base_kernel", exact), own("mlp_conv.kernel_projection.weight", drafter)};
    w.layers.push_back(std::move(l));
  }
  return w;
}

}  // namespace glm53
