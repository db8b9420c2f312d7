// Writes safetensors files and whole small checkpoints for tests, right ones and wrong ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "engine/loader/config.h"
#include "kernels/half.h"
#include "tests/temp_dir.h"

namespace glm53::testing {

using test::TempDir;

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  if (!out) throw std::runtime_error("cannot write " + path);
}

/// Length, header and data as they are, whether they fit or not.
inline std::string raw_file(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + header + data;
}

struct NewTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string data;
};
using NewTensors = std::map<std::string, NewTensor>;

inline std::string file_of(const NewTensors& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::string data;
  for (const auto& [name, t] : tensors) {
    header[name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.data.size()}}};
    data += t.data;
  }
  return raw_file(header.dump(), data);
}

inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// Random values of a size that keeps a network alive.
class Filler {
 public:
  NewTensor bf16(const std::vector<int64_t>& shape, float deviation, float mean = 0) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<uint16_t> v(static_cast<size_t>(elements(shape)));
    for (auto& x : v) x = f32_to_bf16(normal(random_));
    return {"BF16", shape, bytes_of(v)};
  }
  NewTensor f32(const std::vector<int64_t>& shape, float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> v(static_cast<size_t>(elements(shape)));
    for (auto& x : v) x = normal(random_);
    return {"F32", shape, bytes_of(v)};
  }
  NewTensor f16(const std::vector<int64_t>& shape) {
    std::vector<uint16_t> v(static_cast<size_t>(elements(shape)));
    for (auto& x : v) x = f32_to_f16(random_() % 2 == 0 ? 0.1f : -0.1f);
    return {"F16", shape, bytes_of(v)};
  }
  NewTensor i16(const std::vector<int64_t>& shape) {
    std::vector<uint16_t> v(static_cast<size_t>(elements(shape)));
    for (auto& x : v) x = static_cast<uint16_t>(random_());
    return {"I16", shape, bytes_of(v)};
  }
  static NewTensor marker(uint32_t value, const std::vector<int64_t>& shape = {}) {
    return {"I32", shape, bytes_of(std::vector<uint32_t>{value})};
  }

 private:
  std::mt19937 random_{7};
};

/// config.json of a model of three layers: KDA + dense, MLA + sparse, MLA with a shared indexer + sparse; then one MTP
/// layer.
inline nlohmann::json small_config() {
  return nlohmann::json::parse(R"({
    "model_type": "glm5_next",
    "text_config": {
      "model_type": "glm5_next_text", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 256,
      "num_hidden_layers": 3,
      "layer_types": ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention"],
      "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "full", "shared"],
      "num_attention_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
      "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid", "kv_lora_rank": 128, "q_lora_rank": 64, "qk_rope_head_dim": 0,
      "v_head_dim": 32, "qk_nope_head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-05,
      "index_topk": 16, "index_head_dim": 128, "index_n_heads": 2, "index_kpool": 4, "index_kpool_compress": true,
      "index_kpool_always_select_tail": true, "swiglu_limit": 4.0,
      "linear_attn_config": {"head_dim": 64, "num_heads": 2, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "safe_gate": true},
      "mhc": true, "hc_mult": 2, "hc_eps": 1e-06, "hc_sinkhorn_iters": 5, "num_nextn_predict_layers": 1,
      "pad_token_id": 90, "eos_token_id": 90
    }
  })");
}

/// All tensors of a checkpoint of this config; routed experts EXL3 or BF16.
class SmallCheckpoint {
 public:
  SmallCheckpoint(const ModelConfig& config, bool exl3) : c_(config), exl3_(exl3) {
    matrix("lm_head.weight", c_.vocab, c_.hidden);
    tensors["model.language_model.embed_tokens.weight"] = fill_.bf16({c_.vocab, c_.hidden}, 1);
    norm("model.language_model.norm.weight", c_.hidden);
    for (int i = 0; i < c_.layers; ++i) layer(i);
    for (int i = 0; i < c_.mtp_layers; ++i) mtp(c_.layers + i);
  }
  NewTensors tensors;

 private:
  static std::string prefix(int i) { return "model.language_model.layers." + std::to_string(i) + "."; }
  void matrix(const std::string& name, int64_t out, int64_t in) {
    tensors[name] = fill_.bf16({out, in}, 1 / std::sqrt(static_cast<float>(in)));
  }
  void norm(const std::string& name, int64_t n) { tensors[name] = fill_.bf16({n}, 0.1f, 1); }

  void layer(int i) {
    const std::string p = prefix(i);
    const auto at = static_cast<size_t>(i);
    const int64_t n = c_.streams, sites = (2 + n) * n;
    for (const char* site : {"hc_attn_", "hc_ffn_"}) {
      matrix(p + site + "fn", sites, n * c_.hidden);
      tensors[p + site + "base"] = fill_.f32({sites}, 1);
      tensors[p + site + "scale"] = fill_.f32({3}, 1);
    }
    both_norms(p);
    if (c_.attention[at] == AttentionKind::kda) {
      kda(p + "self_attn.");
    } else {
      mla(p + "self_attn.", !c_.shared_indexer[at]);
    }
    if (c_.mlp[at] == MlpKind::dense) {
      swiglu(p + "mlp.", c_.intermediate);
    } else {
      moe(p + "mlp.");
    }
  }
  void mtp(int i) {
    const std::string p = prefix(i);
    both_norms(p);
    matrix(p + "eh_proj.weight", c_.hidden, 2 * c_.hidden);
    for (const char* name : {"enorm", "hnorm", "shared_head.norm"}) norm(p + name + ".weight", c_.hidden);
    mla(p + "self_attn.", true);
    moe(p + "mlp.");
  }
  void both_norms(const std::string& p) {
    norm(p + "input_layernorm.weight", c_.hidden);
    norm(p + "post_attention_layernorm.weight", c_.hidden);
  }
  void kda(const std::string& p) {
    const int64_t width = int64_t{c_.kda_heads} * c_.kda_dim, dim = c_.kda_dim;
    for (const std::string x : {"q", "k", "v"}) {
      matrix(p + x + "_proj.weight", width, c_.hidden);
      tensors[p + x + "_conv1d.weight"] = fill_.bf16({width, 1, 4}, 0.5f);
    }
    for (const std::string x : {"f", "g"}) {
      matrix(p + x + "_a_proj.weight", dim, c_.hidden);
      matrix(p + x + "_b_proj.weight", width, dim);
    }
    matrix(p + "b_proj.weight", c_.kda_heads, c_.hidden);
    norm(p + "o_norm.weight", dim);
    matrix(p + "o_proj.weight", c_.hidden, width);
    tensors[p + "A_log"] = fill_.f32({c_.kda_heads}, 1);
    tensors[p + "dt_bias"] = fill_.f32({width}, 1);
  }
  void mla(const std::string& p, bool own_indexer) {
    const int64_t heads = c_.heads;
    matrix(p + "q_a_proj.weight", c_.q_lora, c_.hidden);
    norm(p + "q_a_layernorm.weight", c_.q_lora);
    matrix(p + "q_b_proj.weight", heads * c_.nope, c_.q_lora);
    matrix(p + "kv_a_proj_with_mqa.weight", c_.kv_lora, c_.hidden);
    norm(p + "kv_a_layernorm.weight", c_.kv_lora);
    matrix(p + "kv_b_proj.weight", heads * (c_.nope + c_.v_dim), c_.kv_lora);
    matrix(p + "o_proj.weight", c_.hidden, heads * c_.v_dim);
    if (!own_indexer) return;
    matrix(p + "indexer.wq_b.weight", int64_t{c_.index_heads} * c_.index_dim, c_.q_lora);
    matrix(p + "indexer.wk.weight", c_.index_dim, c_.hidden);
    norm(p + "indexer.k_norm.weight", c_.index_dim);
    tensors[p + "indexer.k_norm.bias"] = fill_.bf16({c_.index_dim}, 0.1f);
    matrix(p + "indexer.weights_proj.weight", c_.index_heads, c_.hidden);
    matrix(p + "indexer.index_kpool_compress_gate", c_.index_dim, c_.hidden);
    tensors[p + "indexer.index_kpool_compress_ape"] = fill_.bf16({c_.kpool, c_.index_dim}, 1);
  }
  void swiglu(const std::string& p, int64_t width) {
    matrix(p + "gate_proj.weight", width, c_.hidden);
    matrix(p + "up_proj.weight", width, c_.hidden);
    matrix(p + "down_proj.weight", c_.hidden, width);
  }
  void moe(const std::string& p) {
    matrix(p + "gate.weight", c_.experts, c_.hidden);
    tensors[p + "gate.e_score_correction_bias"] = fill_.f32({c_.experts}, 0.2f);
    swiglu(p + "shared_experts.", c_.moe_intermediate * c_.shared_experts);
    for (int e = 0; e < c_.experts; ++e) {
      const std::string x = p + "experts." + std::to_string(e) + ".";
      if (!exl3_) {
        swiglu(x, c_.moe_intermediate);
        continue;
      }
      packed(x + "gate_proj", c_.moe_intermediate, c_.hidden);
      packed(x + "up_proj", c_.moe_intermediate, c_.hidden);
      packed(x + "down_proj", c_.hidden, c_.moe_intermediate);
    }
  }
  void packed(const std::string& p, int64_t out, int64_t in) {
    tensors[p + ".trellis"] = fill_.i16({in / 16, out / 16, 64});
    tensors[p + ".suh"] = fill_.f16({in});
    tensors[p + ".svh"] = fill_.f16({out});
    tensors[p + ".mcg"] = Filler::marker(0xCBAC1FEDu);
  }

  ModelConfig c_;
  bool exl3_;
  Filler fill_;
};

/// Code, text and remedy of the Error that body throws; Code::ok when it throws none.
struct Caught {
  Code code = Code::ok;
  std::string text;
  bool says(const std::string& part) const { return text.find(part) != std::string::npos; }
};
template <class Body>
Caught caught(const Body& body) {
  try {
    body();
  } catch (const Error& e) {
    return {e.code(), std::string(e.what()) + " — " + e.remedy()};
  }
  return {};
}

}  // namespace glm53::testing
