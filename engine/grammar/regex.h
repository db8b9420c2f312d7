// Regular expressions (ECMA-262 subset) as grammars.
#pragma once

#include <string_view>

#include "engine/grammar/chars.h"

namespace glm53::grammar {

enum class Anchoring {
  whole,   ///< the whole text matches
  search,  ///< some part does, unless ^ and $ say otherwise
};

/// Known: alternatives, groups (capturing, (?:…), named), * + ? {n} {n,} {n,m} and their lazy forms, classes, \d \w \s
/// and their negations, escapes, ^ and $ at the ends of top-level alternatives. Throws Error(usage) that names the
/// place for everything else: look-around, back-references, \b, \p, flags.
Builder::Id regex(Builder& builder, std::string_view pattern, Writing writing, Anchoring anchoring);

}  // namespace glm53::grammar
