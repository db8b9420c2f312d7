// What must hold before a tokenizer may serve.
#pragma once

#include <cstdint>
#include <span>

#include "engine/text/tokenizer.h"

namespace glm53::text {

/// Checks the tokens of the chat format, `model_rows` >= tokenizer size, the end tokens, round trips and added tokens
/// in a text, with the release vocabulary also known ids, and a rendered conversation. Throws Error(weights) with the
/// first thing that is wrong.
void self_check(const Tokenizer& tokenizer, int32_t model_rows, std::span<const int32_t> eos);

}  // namespace glm53::text
