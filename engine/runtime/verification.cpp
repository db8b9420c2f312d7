#include "engine/runtime/verification.h"

#include <utility>

namespace glm53 {

SeqResult sample_and_match(std::span<const int32_t> drafts, std::span<SampleOut> out, SamplingState* state) {
  SeqResult result;
  result.drafted = static_cast<int16_t>(drafts.size());
  for (size_t i = 0; i < out.size(); ++i) {
    const int32_t token = out[i].token;
    if (state != nullptr && token >= 0) state->accept(token);
    result.tokens.push_back({token, out[i].logprob, std::move(out[i].top)});
    if (i == drafts.size() || token != drafts[i] || state == nullptr || state->stops(token)) break;
  }
  result.accepted = static_cast<int16_t>(result.tokens.size() - 1);
  return result;
}

}  // namespace glm53
