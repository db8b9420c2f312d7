// Which numbers of ranks divide which model.
#include <doctest/doctest.h>

#include "common/file.h"
#include "engine/loader/config.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Caught;

ModelConfig config_of(const std::string& path) {
  return parse_model_config(read_file(path), path);
}

TEST_CASE("the real model divides among 1, 2, 4, 8 and 16 ranks and no other number up to 16") {
  const ModelConfig c = config_of(GLM53_SOURCE_DIR "/tests/unit/loader/real_config.json");
  for (int size = 1; size <= 16; ++size) {
    CAPTURE(size);
    const bool allowed = 16 % size == 0;
    for (int rank = 0; rank < size; ++rank) {
      ShardPlan plan;
      const Caught error = caught([&] { plan = plan_shard(c, rank, size, true); });
      CHECK((error.code == Code::ok) == allowed);
      if (!allowed) {
        CHECK(error.code == Code::config);
        CHECK(error.says("num_heads = 64 is not a multiple of " + std::to_string(size)));
        continue;
      }
      CHECK(plan.rank == rank);
      CHECK(plan.size == size);
      CHECK(plan.kda_heads == 64 / size);
      CHECK(plan.heads == 64 / size);
      CHECK(plan.intermediate == 12288 / size);
      CHECK(plan.moe_intermediate == 2048 / size);
      CHECK(plan.shared_intermediate == 2048 / size);
      CHECK(plan.vocab == 154880 / size);
    }
  }
  const Caught far = caught([&] { (void)plan_shard(c, 0, 32, true); });
  CHECK(far.says("moe_intermediate_size / 32 = 64 is not a multiple of 128"));
  CHECK(plan_shard(c, 0, 32, false).moe_intermediate == 64);  // unpacked experts may be cut anywhere
}

TEST_CASE("the small models divide between two ranks, not four") {
  for (const bool exl3 : {true, false}) {
    const ModelConfig c = config_of(exl3 ? GLM53_SOURCE_DIR "/models/glm53-tiny/config.json"
                                         : GLM53_BINARY_DIR "/golden/tiny-random/config.json");
    CHECK(plan_shard(c, 1, 2, exl3).kda_heads == 1);
    const Caught four = caught([&] { (void)plan_shard(c, 0, 4, exl3); });
    CHECK(four.code == Code::config);
    CHECK(four.says("linear_attn_config.num_heads = 2 is not a multiple of 4"));
    CHECK(four.says("block of EXL3") == exl3);
  }
}

TEST_CASE("ranks that do not exist") {
  const ModelConfig c = config_of(GLM53_SOURCE_DIR "/models/glm53-tiny/config.json");
  for (const auto& [rank, size] : {std::pair{0, 0}, {-1, 1}, {2, 2}})
    CHECK(caught([&, r = rank, s = size] { (void)plan_shard(c, r, s, true); }).says("does not exist"));
}

}  // namespace
}  // namespace glm53
