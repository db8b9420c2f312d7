#pragma once
#include <string>

#include "engine/text/tokenizer.h"

/// The tokenizer of models/glm53-tiny.
inline const glm53::text::Tokenizer& tiny() {
  static const auto tokenizer =
      glm53::text::Tokenizer::load(std::string(GLM53_SOURCE_DIR) + "/models/glm53-tiny/tokenizer.json");
  return tokenizer;
}
