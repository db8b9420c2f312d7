// config.json of the real model and of wrong ones.
#include "engine/loader/config.h"

#include <doctest/doctest.h>

#include "common/file.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Caught;
using testing::small_config;

nlohmann::json real() {
  return nlohmann::json::parse(read_file(std::string(GLM53_SOURCE_DIR) + "/tests/unit/loader/real_config.json"));
}

Caught parse(const nlohmann::json& json) {
  return caught([&] { (void)parse_model_config(json.dump(), "config.json"); });
}

TEST_CASE("the real configuration") {
  const ModelConfig c = load_model_config([] {
    static const testing::TempDir dir;
    testing::write_text(dir / "config.json", real().dump());
    return dir.path();
  }());
  CHECK(c.vocab == 154880);
  CHECK(c.hidden == 4096);
  CHECK(c.layers == 45);
  CHECK(c.mtp_layers == 1);
  CHECK(c.kda_layers() == 34);
  CHECK(c.mla_layers() == 11);
  CHECK(c.kind_index(43) == 10);
  CHECK(c.kind_index(44) == 33);
  CHECK(c.mlp[2] == MlpKind::dense);
  CHECK(c.mlp[3] == MlpKind::sparse);
  CHECK(std::count(c.shared_indexer.begin(), c.shared_indexer.end(), true) == 0);
  CHECK(c.kpool == 4);
  CHECK(c.top_pools() == 512);
  CHECK(c.attention_scale() == 0.0625f);
  CHECK(c.experts == 288);
  CHECK(c.experts_per_token == 8);
  CHECK(c.routed_scale == 2.5f);
  CHECK(c.gate_lower_bound == -5.0f);
  CHECK(c.streams == 4);
  CHECK(c.sinkhorn == 20);
  CHECK(c.max_positions == 1048576);
  CHECK(c.eos == std::vector<int32_t>{154820, 154827, 154829});
  CHECK(c.pad == 154820);
  CHECK(c.has_vision);
  CHECK(c.digest.size() == 64);
}

TEST_CASE("shapes that a config may leave out") {
  nlohmann::json json = real();
  json["text_config"].erase("mlp_layer_types");
  json["text_config"].erase("layer_types");
  json["text_config"].erase("indexer_types");
  json["text_config"].erase("num_nextn_predict_layers");
  json.erase("vision_config");
  const ModelConfig c = parse_model_config(json.dump(), "config.json");
  CHECK(c.mla_layers() == 11);
  CHECK(c.attention[43] == AttentionKind::mla);
  CHECK(std::count(c.mlp.begin(), c.mlp.end(), MlpKind::dense) == 3);
  CHECK(c.mtp_layers == 0);
  CHECK_FALSE(c.has_vision);

  const ModelConfig small = parse_model_config(small_config().dump(), "config.json");
  CHECK(small.eos == std::vector<int32_t>{90});
  CHECK(small.shared_indexer == std::vector<bool>{false, false, true});
  CHECK(small.groups == 2);
}

TEST_CASE("unsupported and impossible values are refused by name") {
  struct Case {
    const char *path, *value, *says;
  };
  const Case cases[] = {
      {"/model_type", "\"llama\"", "glm5_next"},
      {"/text_config/model_type", "\"llama\"", "glm5_next_text"},
      {"/text_config/hidden_act", "\"gelu\"", "silu"},
      {"/text_config/scoring_func", "\"softmax\"", "sigmoid"},
      {"/text_config/topk_method", "\"greedy\"", "noaux_tc"},
      {"/text_config/moe_router_dtype", "\"bfloat16\"", "float32"},
      {"/text_config/dtype", "\"float16\"", "bfloat16"},
      {"/text_config/attention_bias", "true", "only false"},
      {"/text_config/tie_word_embeddings", "true", "only false"},
      {"/tie_word_embeddings", "true", "only false"},
      {"/text_config/mla_use_nope", "false", "only true"},
      {"/text_config/mhc", "false", "only true"},
      {"/text_config/index_kpool_compress", "false", "only true"},
      {"/text_config/index_kpool_always_select_tail", "false", "only true"},
      {"/text_config/qk_rope_head_dim", "64", "only 0"},
      {"/text_config/num_key_value_heads", "8", "only 64"},
      {"/text_config/linear_attn_config/safe_gate", "false", "only true"},
      {"/text_config/linear_attn_config/short_conv_kernel_size", "3", "only 4"},
      {"/text_config/linear_attn_config/gate_lower_bound", "1.0", "less than 0"},
      {"/text_config/linear_attn_config/kda_layers", "[0]", "kda_layers"},
      {"/text_config/linear_attn_config/full_attn_layers", "[0]", "second time"},
      {"/text_config/linear_attn_config/full_attn_layers", "[99]", "numbered 0 to 44"},
      {"/text_config/linear_attn_config", "7", "expected an object"},
      {"/quantization_config/quant_method", "\"fp8\"", "exl3"},
      {"/text_config/layer_types", "[\"linear_attention\"]", "expected num_hidden_layers = 45"},
      {"/text_config/layer_types/5", "\"full_attention\"", "deepseek_sparse_attention"},
      {"/text_config/layer_types/5", "\"deepseek_sparse_attention\"", "both must agree"},
      {"/text_config/layer_types/5", "5", "list of strings"},
      {"/text_config/mlp_layer_types", "[]", "expected num_hidden_layers = 45"},
      {"/text_config/mlp_layer_types/5", "\"moe\"", "dense, sparse"},
      {"/text_config/indexer_types", "[\"full\"]", "expected num_hidden_layers = 45"},
      {"/text_config/indexer_types/7", "\"half\"", "full, shared"},
      {"/text_config/indexer_types/7", "\"shared\"", "follows a KDA layer"},
      {"/text_config/index_kpool", "3", "must divide"},
      {"/text_config/index_topk", "2047", "multiple of index_kpool"},
      {"/text_config/num_experts_per_tok", "289", "from 1 to 288"},
      {"/text_config/n_group", "5", "must divide"},
      {"/text_config/hidden_size", "0", "from 1 to"},
      {"/text_config/hidden_size", "-4096", "from 1 to"},
      {"/text_config/hidden_size", "4096.0", "integer"},
      {"/text_config/hidden_size", "18446744073709551615", "integer"},
      {"/text_config/hidden_size", "\"4096\"", "integer"},
      {"/text_config/vocab_size", "null", "missing"},
      {"/text_config/rms_norm_eps", "0", "greater than 0"},
      {"/text_config/swiglu_limit", "-1", "greater than 0"},
      {"/text_config/swiglu_limit", "null", "missing"},
      {"/text_config/norm_topk_prob", "1", "true or false"},
      {"/text_config/eos_token_id", "[]", "empty list"},
      {"/text_config/eos_token_id", "154880", "below vocab_size"},
      {"/text_config/eos_token_id", "[1, \"x\"]", "list of integers"},
      {"/text_config/pad_token_id", "154880", "from 0 to 154879"},
  };
  for (const Case& c : cases) {
    nlohmann::json json = real();
    json[nlohmann::json::json_pointer(c.path)] = nlohmann::json::parse(c.value);
    const Caught error = parse(json);
    const std::string path = c.path;
    std::string field = path.substr(path.rfind('/') + 1);
    if (field.find_first_not_of("0123456789") == std::string::npos) {
      const std::string list = path.substr(0, path.rfind('/'));
      field = list.substr(list.rfind('/') + 1);
    }
    CAPTURE(path);
    CAPTURE(error.text);
    CHECK(error.code == Code::config);
    CHECK(error.says("config.json"));
    CHECK((error.says("." + field) || std::string(c.says).find("agree") != std::string::npos));
    CHECK(error.says(c.says));
  }
  CHECK(caught([] { (void)parse_model_config("{", "config.json"); }).says("invalid JSON"));
  CHECK(caught([] { (void)parse_model_config("[]", "config.json"); }).code == Code::config);
  nlohmann::json first = small_config();
  first["text_config"]["layer_types"][0] = "deepseek_sparse_attention";
  first["text_config"]["indexer_types"][0] = "shared";
  CHECK(parse(first).says("the first"));
  nlohmann::json groups = small_config();
  groups["text_config"]["num_experts_per_tok"] = 3;
  CHECK(parse(groups).says("hold only 2 experts"));
}

TEST_CASE("a config with any field missing parses or says what is missing") {
  const nlohmann::json whole = real();
  int refused = 0;
  for (const auto& [key, value] : whole["text_config"].items()) {
    nlohmann::json json = whole;
    json["text_config"].erase(key);
    const Caught error = parse(json);
    CAPTURE(key);
    CAPTURE(error.text);
    CHECK((error.code == Code::ok || (error.code == Code::config && error.says(key) && error.says("missing"))));
    refused += error.code == Code::config ? 1 : 0;
  }
  CHECK(refused >= 20);
}

}  // namespace
}  // namespace glm53
