// What a checkpoint must hold, and what is said about one that does not.
#include <doctest/doctest.h>

#include "engine/loader/config.h"
#include "engine/loader/safetensors.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Caught;
using testing::Filler;
using testing::NewTensors;

ModelConfig small() {
  return parse_model_config(testing::small_config().dump(), "config.json");
}
const std::string kLayers = "model.language_model.layers.";

Caught check(const NewTensors& tensors) {
  const testing::TempDir dir;
  testing::write_text(dir / "model.safetensors", testing::file_of(tensors));
  return caught([&] { check_inventory(Checkpoint(dir.path()), small()); });
}

TEST_CASE("complete checkpoints pass") {
  NewTensors packed = testing::SmallCheckpoint(small(), true).tensors,
             plain = testing::SmallCheckpoint(small(), false).tensors;
  CHECK(check(packed).text == "");
  CHECK(check(plain).text == "");
  packed["model.visual.anything"] = {"U8", {1}, "x"};
  packed[kLayers + "1.mlp.experts.0.up_proj.mcg"] = Filler::marker(0xCBAC1FEDu, {1});
  CHECK(check(packed).text == "");
  packed.erase(kLayers + "1.mlp.experts.0.up_proj.mcg");
  CHECK(check(packed).text == "");  // neither marker: the 3INST codebook
  const std::string trained = GLM53_SOURCE_DIR "/models/glm53-tiny";
  for (const std::string& path : {trained, std::string(GLM53_BINARY_DIR "/golden/tiny-random")}) {
    const Checkpoint checkpoint(path);
    check_inventory(checkpoint, load_model_config(path));
    CHECK(has_exl3_experts(checkpoint) == (path == trained));
  }
}

TEST_CASE("every tensor is needed, in its shape and dtype, and no other") {
  const NewTensors whole = testing::SmallCheckpoint(small(), true).tensors;
  for (const auto& [name, tensor] : whole) {
    if (name.ends_with(".mcg")) continue;  // says which codebook; may be absent
    NewTensors missing = whole;
    missing.erase(name);
    const Caught error = check(missing);
    CAPTURE(name);
    CAPTURE(error.text);
    CHECK(error.code == Code::weights);
    CHECK(error.says(name.substr(0, name.rfind('.'))));
  }
  NewTensors wrong = whole;
  const std::string q_b = kLayers + "1.self_attn.q_b_proj.weight", a_log = kLayers + "0.self_attn.A_log",
                    extra = kLayers + "2.self_attn.indexer.wk.weight";
  wrong[q_b].shape = {64, 256};
  wrong[a_log] = {"BF16", {2}, "abcd"};
  wrong[extra] = whole.at(kLayers + "1.self_attn.indexer.wk.weight");  // layer 2 shares its indexer
  wrong.erase("lm_head.weight");
  const Caught error = check(wrong);
  CAPTURE(error.text);
  CHECK(error.says("4 tensors do not fit"));
  CHECK(error.says(q_b + " (model.safetensors): found bf16 [64, 256], expected bf16 [256, 64]"));
  CHECK(error.says(a_log + " (model.safetensors): found bf16 [2], expected f32 [2]"));
  CHECK(error.says(extra + " (model.safetensors): found bf16 [128, 128], expected no such tensor"));
  CHECK(error.says("lm_head.weight: found nothing, expected bf16 [96, 128]"));
}

TEST_CASE("wrong EXL3 projections") {
  const NewTensors whole = testing::SmallCheckpoint(small(), true).tensors;
  const std::string p = kLayers + "1.mlp.experts.3.up_proj";
  Filler fill;
  const auto with = [&](const std::string& suffix, const testing::NewTensor& tensor) {
    NewTensors changed = whole;
    changed[p + suffix] = tensor;
    return check(changed);
  };
  CHECK(with(".su", fill.i16({8})).says(p + ".su (model.safetensors): found i16 [8], expected no packed signs"));
  CHECK(with(".sv", fill.i16({16})).says("quantise again"));
  CHECK(with(".bias", fill.f16({256})).says("no bias"));
  CHECK(with(".scale", fill.f16({1})).says("very old EXL3"));
  CHECK(with(".mul1", Filler::marker(0x83DCD12Du)).says("both .mcg and .mul1"));
  CHECK(with(".mcg", Filler::marker(1, {1, 1})).says("expected i32 [] or [1]"));
  CHECK(with(".suh", fill.f16({256})).says(".suh (model.safetensors): found f16 [256], expected f16 [128]"));
  CHECK(with(".trellis", fill.i16({8, 16, 60})).says("16 × 1 to 8 bits"));
  CHECK(with(".trellis", fill.i16({16, 8, 64})).says("expected i16 [8, 16, 16 × 1 to 8 bits]"));
  CHECK(with(".trellis", fill.i16({8, 16, 48})).text == "");  // three bits are fine
  CHECK(with(".weight", fill.bf16({256, 128}, 1)).says("expected no such tensor"));
}

TEST_CASE("many findings are counted") {
  nlohmann::json json = testing::small_config();
  json["text_config"]["n_routed_experts"] = 64;
  const testing::TempDir dir;
  testing::write_text(dir / "model.safetensors", testing::file_of({{"model.visual.only", {"U8", {1}, "x"}}}));
  const Caught error =
      caught([&] { check_inventory(Checkpoint(dir.path()), parse_model_config(json.dump(), "config.json")); });
  CHECK(error.says("… and "));
  CHECK(error.text.size() < 60000);
}

}  // namespace
}  // namespace glm53
