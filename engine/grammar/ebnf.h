// Grammars written as EBNF, in the GBNF dialect.
#pragma once

#include <string_view>

#include "engine/grammar/grammar.h"

namespace glm53::grammar {

/// Rules `name ::= …` of which `root` is the text: "literals" with the escapes \" \\ \n \r \t \xHH \uHHHH \UHHHHHHHH,
/// classes [a-z] and [^…], `.` for any character, names, ( … ), |, and * + ? {n} {n,} {n,m}; # begins a comment.
/// Returns the rule `root`. Throws Error(usage) with line and column.
uint32_t ebnf(Builder& builder, std::string_view source);

}  // namespace glm53::grammar
