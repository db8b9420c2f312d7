// Clean-up of compiled grammars.
#pragma once

#include <string>
#include <vector>

#include "engine/grammar/grammar.h"

namespace glm53::grammar {

/// Shortens chains of skips and removes every way that cannot lead to an end. Throws Error(usage) when no text matches
/// and when a rule can call itself before it reads anything.
void prune(Grammar& grammar, const std::vector<std::string>& names, Budget& budget);

}  // namespace glm53::grammar
