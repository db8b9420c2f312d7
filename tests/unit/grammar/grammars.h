#pragma once
#include <memory>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "engine/grammar/compile.h"
#include "engine/grammar/engine.h"
#include "tests/unit/text/tiny.h"

/// Helpers of the grammar tests.
namespace glm53::grammar {

using Json = nlohmann::ordered_json;

inline std::shared_ptr<const Vocabulary> tiny_vocabulary() {
  static const auto vocabulary = vocabulary_of(tiny());
  return vocabulary;
}

inline Engine engine_of(const Json& demand) {
  return {std::make_shared<const Grammar>(compile(dump(demand))), tiny_vocabulary()};
}
inline Json schema_demand(std::string_view schema) {
  return {{"content", {{"json", parse_json(schema)}}}, {"path", "schema"}};
}

/// Whether the bytes are a text of the grammar, taken one by one.
inline bool accepts(Engine& engine, std::string_view text) {
  return engine.complete(engine.after(engine.start(), text));
}
/// What compiling says; "" when it succeeds.
inline std::string refusal(const Json& demand) {
  try {
    compile(dump(demand));
    return {};
  } catch (const Error& e) {
    return e.code() == Code::usage ? e.what() : std::string("NOT A USAGE ERROR: ") + e.what();
  }
}

}  // namespace glm53::grammar
