#include "engine/runtime/rank_weights.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/config.h"
#include "engine/loader/formats.h"

namespace glm53 {
namespace {

Config config(const nlohmann::ordered_json& settings) {
  return Config::from_json(settings, "a test");
}

TEST_CASE("formats by group: engine.dense and engine.head, then engine.formats") {
  CHECK(formats_text(format_policy(config(nlohmann::ordered_json::object()))) == "as stored");
  CHECK(formats_text(format_policy(config({{"engine.dense", "fp8"}, {"engine.head", "int4"}}))) ==
        "kda_in fp8, kda_out fp8, mla fp8, shared_expert fp8, dense_mlp fp8, head int4");
  CHECK(formats_text(format_policy(config({{"engine.dense", "fp8"},
                                           {"engine.formats.mla", "int4"},
                                           {"engine.formats.kda_out", "stored"},
                                           {"engine.formats.indexer", "fp8"},
                                           {"engine.formats.drafter", "int4"}}))) ==
        "kda_in fp8, mla int4, indexer fp8, shared_expert fp8, dense_mlp fp8, drafter int4");
}

TEST_CASE("what decides the bits is told apart") {
  const auto text = [](const char* key, const char* value) { return formats_of(config({{key, value}})); };
  const std::string plain = formats_of(config(nlohmann::ordered_json::object()));
  CHECK(text("engine.formats.mla", "fp8") != plain);
  CHECK(text("engine.formats.mla", "fp8") != text("engine.formats.mla", "int4"));
  CHECK(text("serve.kv_format", "bf16") != plain);
  CHECK(text("engine.formats.mla", "stored") == plain);
}

TEST_CASE("model.prepared and engine.check_weights reach the load") {
  const LoadOptions none = load_options(config(nlohmann::ordered_json::object()));
  CHECK(none.prepared.empty());
  CHECK_FALSE(none.check_values);
  const LoadOptions both = load_options(config({{"model.prepared", "/data/prepared"}, {"engine.check_weights", true}}));
  CHECK(both.prepared == "/data/prepared");
  CHECK(both.check_values);
}

}  // namespace
}  // namespace glm53
