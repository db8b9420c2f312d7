// The engine's commands for people, on copies of glm53-tiny.
#include "engine/commands.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "engine/comm/communicator.h"
#include "engine/loader/safetensors.h"
#include "engine/model/load.h"
#include "kernels/ops.h"
#include "tests/temp_dir.h"

namespace glm53 {
namespace {

const std::string kTiny = GLM53_SOURCE_DIR "/models/glm53-tiny";

/// What a command printed, and the error it ended with.
struct Outcome {
  std::string out, error;
  int code = -1;
  bool says(const std::string& part) const { return (out + error).find(part) != std::string::npos; }
};
template <class Body>
Outcome run(const Body& body) {
  std::ostringstream caught;
  std::streambuf* const before = std::cout.rdbuf(caught.rdbuf());
  Outcome o;
  try {
    o.code = body();
  } catch (const Error& e) {
    o.error = e.line();
  }
  std::cout.rdbuf(before);
  o.out = caught.str();
  return o;
}

/// A copy of the model with two values of a tensor that are no numbers.
class Poisoned {
 public:
  explicit Poisoned(const std::string& tensor) {
    std::filesystem::copy(kTiny, dir_.path(), std::filesystem::copy_options::recursive);
    const TensorInfo info = Checkpoint(kTiny).info(tensor);
    std::fstream file(dir_ / info.file, std::ios::in | std::ios::out | std::ios::binary);
    const uint16_t bad[] = {0x7fc0, 0xff80};  // NaN and −∞ of bf16
    file.seekp(static_cast<std::streamoff>(info.begin) + 2 * info.shape.back());
    file.write(reinterpret_cast<const char*>(bad), sizeof bad);
    REQUIRE(file.good());
  }
  const std::string& path() const { return dir_.path(); }

 private:
  test::TempDir dir_;
};

TEST_CASE("describe names every weight format") {
  const Outcome o = run(describe);
  CHECK(o.code == 0);
  const auto json = parse_json(o.out);
  CHECK(json.at("weight_formats") == nlohmann::ordered_json{"f32", "bf16", "exl3", "fp8", "int4"});
  CHECK(json.at("backends")[0] == "cpu");
}

TEST_CASE("check: a whole checkpoint, and one with values that are not finite") {
  for (const bool values : {false, true}) {
    const Outcome o = run([&] { return check_checkpoint(kTiny, values); });
    CHECK(o.code == 0);
    CHECK(o.says(": ok, "));
    CHECK(o.says("0 with values that are not finite") == values);
  }
  const std::string tensor = "model.language_model.layers.3.self_attn.q_b_proj.weight";
  const Poisoned model(tensor);
  CHECK(run([&] { return check_checkpoint(model.path(), false); }).code == 0);
  const Outcome o = run([&] { return check_checkpoint(model.path(), true); });
  CHECK(o.code == -1);
  CHECK(o.says("layer 3, " + tensor));
  CHECK(o.says("1 NaN and 1 infinite of"));
  CHECK(o.says("the first at [1, 0]"));
  CHECK(o.says("1 tensors hold values that are not finite"));
}

TEST_CASE("check: a wrong shape and bad values are both told") {
  const Poisoned model("model.language_model.layers.3.self_attn.q_b_proj.weight");
  std::ifstream in(model.path() + "/config.json");
  auto config = nlohmann::ordered_json::parse(in);
  config["text_config"]["intermediate_size"] = config["text_config"]["intermediate_size"].get<int>() * 2;
  std::ofstream(model.path() + "/config.json") << config.dump();
  const Outcome o = run([&] { return check_checkpoint(model.path(), true); });
  CHECK(o.says("layer 3, "));
  CHECK(o.says("layers.0.mlp.gate_proj.weight"));
}

TEST_CASE("a load and a preparation that look at values end with layer and tensor") {
  const std::string tensor = "model.language_model.layers.3.self_attn.q_b_proj.weight";
  const Poisoned model(tensor);
  const auto ops = make_cpu_ops(1);
  const auto comm = make_single_communicator();
  const auto load = [&](bool checked) {
    return run([&] {
      LoadOptions options;
      options.check_values = checked;
      (void)load_model(model.path(), FormatPolicy::as_stored(), {}, *ops, *comm, options);
      return 0;
    });
  };
  CHECK(load(false).code == 0);
  CHECK(load(true).says("layer 3, " + tensor));
  const test::TempDir out;
  PrepareOptions options;
  options.model = model.path();
  options.out = out.path();
  options.check_weights = true;
  CHECK(run([&] { return prepare(options); }).says("layer 3, " + tensor));
}

TEST_CASE("prepare: folders of all ranks or of one, formats by group") {
  const test::TempDir out;
  PrepareOptions options;
  options.model = kTiny;
  options.out = out.path();
  options.ranks = 2;
  options.dense = "fp8";
  options.formats = {"mla=int4", "indexer=fp8"};
  const Outcome o = run([&] { return prepare(options); });
  CHECK(o.code == 0);
  CHECK(o.says("kda_in fp8, kda_out fp8, mla int4, indexer fp8"));
  for (const char* rank : {"/rank0of2", "/rank1of2"})
    CHECK(std::filesystem::exists(out.path() + rank + "/manifest.json"));
  options.ranks = 1;
  options.rank = 0;
  CHECK(run([&] { return prepare(options); }).says("rank0of1"));
  options.rank = 1;
  CHECK(run([&] { return prepare(options); }).says("ranks count from 0"));
  options.rank = -1;
  for (const auto& [format, why] : {std::pair("mla", "GROUP=FORMAT"),
                                    {"mla=fp4", "is no format"},
                                    {"moe=fp8", "is no group"},
                                    {"routed_expert=fp8", "cannot be converted"}}) {
    options.formats = {format};
    CHECK(run([&] { return prepare(options); }).says(why));
  }
}

}  // namespace
}  // namespace glm53
