// Text of a sequence of ids, as they come.
#pragma once

#include <cstdint>
#include <string>

#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

namespace glm53::text {

/// State of one sequence. The concatenation of all that push() and finish() append equals Tokenizer::decode of the ids:
/// never half a code point, never a retraction. Bytes on the two sides of an added token never combine.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}
  void push(int32_t id, std::string& out) {
    const std::string_view bytes = tokenizer_->bytes(id);
    if (!tokenizer_->is_added(id)) {
      stream_.push(bytes, out);
      return;
    }
    stream_.flush(out);
    if (!skip_special_ || !tokenizer_->is_special(id)) out += bytes;
  }
  void finish(std::string& out) { stream_.flush(out); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Stream stream_;
};

}  // namespace glm53::text
