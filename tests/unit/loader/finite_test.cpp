#include "engine/loader/finite.h"

#include <cstring>

#include <doctest/doctest.h>

#include "engine/loader/source.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Filler;
using testing::NewTensors;
using testing::TempDir;

/// Puts a value into a tensor.
void poison(NewTensors& tensors, const std::string& name, size_t element, uint32_t bits) {
  auto& t = tensors.at(name);
  const size_t size = t.dtype == "F32" ? 4 : 2;
  std::memcpy(t.data.data() + element * size, &bits, size);
}

NewTensors some() {
  Filler fill;
  return {{"model.language_model.layers.3.a.weight", fill.bf16({8, 12}, 1)},
          {"model.language_model.layers.12.b", fill.f32({7}, 1)},
          {"c.svh", fill.f16({128})},
          {"codes", fill.i16({64, 64})},
          {"lm_head.weight", fill.bf16({300, 100}, 1)}};
}

CheckpointValues check(const NewTensors& tensors, const ReadOptions& options) {
  const TempDir dir;
  testing::write_text(dir / "model.safetensors", testing::file_of(tensors));
  return check_values(Checkpoint(dir.path()), options);
}

TEST_CASE("values that are no numbers are found, in pieces of any length") {
  NewTensors tensors = some();
  for (const size_t block : {size_t{3}, size_t{4096}, size_t{1} << 20}) {
    CAPTURE(block);
    CHECK(check(tensors, {.block = block}).findings.empty());
  }
  poison(tensors, "model.language_model.layers.3.a.weight", 41, 0x7fc0);  // NaN at [3, 5]
  poison(tensors, "model.language_model.layers.3.a.weight", 95, 0xff80);  // −∞
  poison(tensors, "model.language_model.layers.12.b", 6, 0x7f800000);
  poison(tensors, "c.svh", 100, 0x7e00);
  for (const size_t block : {size_t{1}, size_t{5}, size_t{1} << 20}) {
    CAPTURE(block);
    const CheckpointValues found = check(tensors, {.block = block});
    CHECK(found.tensors == 5);
    CHECK(found.bytes == 192 + 28 + 256 + 8192 + 60'000);
    CHECK(found.bad_tensors == 3);
    CHECK(found.nan == 2);
    CHECK(found.infinite == 2);
    REQUIRE(found.findings.size() == 3);
    CHECK(found.findings[0] == "c.svh (model.safetensors): 1 NaN and 0 infinite of 128 f16 values, the first at [100]");
    CHECK(found.findings[1] ==
          "layer 12, model.language_model.layers.12.b (model.safetensors): 0 NaN and 1 infinite of 7 f32 values, the "
          "first at [6]");
    CHECK(
        found.findings[2] ==
        "layer 3, model.language_model.layers.3.a.weight (model.safetensors): 1 NaN and 1 infinite of 96 bf16 values, "
        "the first at [3, 5]");
  }
}

TEST_CASE("the list of findings is bounded, the counts are not") {
  NewTensors tensors;
  for (int i = 0; i < 230; ++i) {
    const std::string name = "t" + std::to_string(i);
    tensors[name] = Filler().f32({2}, 1);
    poison(tensors, name, 1, 0x7fc00000);
  }
  const CheckpointValues found = check(tensors, {});
  CHECK(found.findings.size() == CheckpointValues::kMostFindings);
  CHECK(found.bad_tensors == 230);
}

TEST_CASE("a source that checks values refuses a weight by layer and name, another one does not look") {
  NewTensors tensors = some();
  const std::string name = "model.language_model.layers.3.a.weight";
  poison(tensors, name, 41, 0x7fc0);
  const TempDir dir;
  testing::write_text(dir / "model.safetensors", testing::file_of(tensors));
  const auto ops = make_cpu_ops(1);
  const auto checkpoint = std::make_shared<const Checkpoint>(dir.path());
  const auto take = [&](bool checked, int rank, bool ahead) {
    SourceOptions options;
    options.check_values = checked;
    if (ahead) options.takes = {{{{name, Split::rows}}, WeightGroup::mla, false}};
    const auto source = make_checkpoint_source(checkpoint, FormatPolicy::as_stored(), {rank, 2}, *ops, options);
    return caught([&] { (void)source->take(name, WeightGroup::mla, Split::rows); });
  };
  for (const bool ahead : {false, true}) {
    CHECK(take(true, 0, ahead).says("layer 3, " + name + ": 1 NaN and 0 infinite values in this rank's part"));
    CHECK(take(true, 0, ahead).code == Code::weights);
    CHECK(take(true, 1, ahead).code == Code::ok);  // the other rank's rows
    CHECK(take(false, 0, ahead).code == Code::ok);
  }
}

TEST_CASE("e4m3 has one NaN and no infinity") {
  ValueCheck check(Dtype::e4m3);
  const uint8_t values[] = {0x7e, 0x7f, 0xff, 0x00};
  check.append(std::as_bytes(std::span(values)));
  CHECK(check.nan() == 2);
  CHECK(check.infinite() == 0);
  CHECK(check.first() == 1);
}

}  // namespace
}  // namespace glm53
