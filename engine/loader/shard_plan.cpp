#include "common/error.h"
#include "common/strings.h"
#include "engine/loader/config.h"

namespace glm53 {

ShardPlan plan_shard(const ModelConfig& config, int rank, int size, bool exl3) {
  constexpr int64_t kPackedBlock = 128;  // EXL3 transforms features in blocks of 128
  if (size < 1 || rank < 0 || rank >= size)
    throw Error(Code::config, cat("rank ", rank, " of ", size, " does not exist"), "ranks count from 0 to size − 1");
  std::vector<std::string> reasons;
  const auto part = [&](std::string_view what, int64_t whole) {
    if (whole % size != 0) reasons.push_back(cat(what, " = ", whole, " is not a multiple of ", size));
    return whole / size;
  };
  ShardPlan plan;
  plan.rank = rank;
  plan.size = size;
  plan.kda_heads = static_cast<int>(part("linear_attn_config.num_heads", config.kda_heads));
  plan.heads = static_cast<int>(part("num_attention_heads", config.heads));
  plan.intermediate = part("intermediate_size", config.intermediate);
  plan.moe_intermediate = part("moe_intermediate_size", config.moe_intermediate);
  plan.shared_intermediate = part("shared expert width", config.moe_intermediate * config.shared_experts);
  plan.vocab = part("vocab_size", config.vocab);
  if (exl3 && config.moe_intermediate % size == 0 && plan.moe_intermediate % kPackedBlock != 0)
    reasons.push_back(cat("moe_intermediate_size / ", size, " = ", plan.moe_intermediate, " is not a multiple of ",
                          kPackedBlock, ", the block of EXL3 experts"));
  if (!reasons.empty())
    throw Error(Code::config, cat("this model cannot be divided among ", size, " ranks: ", join(reasons, "; ")),
                "use a number of ranks that divides all of these");
  return plan;
}

}  // namespace glm53
