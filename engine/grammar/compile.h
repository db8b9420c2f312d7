// From what a request asks of its output to a grammar, and the grammars in use.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "engine/grammar/engine.h"
#include "engine/grammar/grammar.h"
#include "engine/grammar/vocabulary.h"
#include "engine/text/tokenizer.h"

namespace glm53::grammar {

/// A demand is one line of JSON, made by the API process, compiled there and on rank 0:
///   {"content": {"json": SCHEMA} | {"json_object": true} | {"regex": TEXT} | {"ebnf": TEXT} | {"choice": [TEXT…]},
///    "path": where the client wrote it (for messages),
///    "calls": "many" | "one", "markup": [ids of <tool_call> </tool_call> <arg_key> </arg_key> <arg_value>
///    </arg_value>], "tools": [{"name", "parameters", "strict"}]}
/// The output is the content, or calls; one of them may be missing. Arguments come in the order of the declared
/// members, their values typed by the schema; tools without `strict` whose schema cannot be enforced take any.
/// Throws Error(usage).
Grammar compile(std::string_view demand, Budget& budget);
Grammar compile(std::string_view demand);

/// The ordinary tokens of a tokenizer; added tokens are never inside text.
std::shared_ptr<const Vocabulary> vocabulary_of(const text::Tokenizer& tokenizer);

/// Engines by demand; the least recently used are given up. Thread-safe.
class Cache {
 public:
  explicit Cache(std::shared_ptr<const Vocabulary> vocabulary, size_t most = 32);
  /// Throws Error(usage).
  std::shared_ptr<Engine> get(const std::string& demand);

 private:
  struct Entry {
    std::shared_ptr<Engine> engine;
    std::list<std::string>::iterator use;
  };
  const std::shared_ptr<const Vocabulary> vocabulary_;
  const size_t most_;
  std::mutex mutex_;
  std::list<std::string> uses_;  ///< latest first
  std::unordered_map<std::string, Entry> entries_;
};

}  // namespace glm53::grammar
