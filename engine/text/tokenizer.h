// The model's tokenizer: byte-level BPE read from tokenizer.json.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/bpe.h"
#include "engine/text/pretokenizer.h"

namespace glm53::text {

/// Text for the tokenizer with its origin: markup that the chat template wrote, or text a client supplied.
struct TextPiece {
  std::string text;
  bool markup = false;
  bool operator==(const TextPiece&) const = default;
};

/// Which added tokens spelled in client text become ordinary text. (In markup all of them are tokens.)
enum class Escape {
  none,     ///< every added token is recognised
  media,    ///< image and video tokens are text: they must not stand for media that is not there
  control,  ///< media and all special tokens are text
};

/// Ids of the tokens that the chat format is made of.
struct ChatTokens {
  int32_t system = 0, user = 0, assistant = 0, observation = 0;
  int32_t think = 0, think_end = 0;
  int32_t tool_call = 0, tool_call_end = 0, arg_key = 0, arg_key_end = 0, arg_value = 0, arg_value_end = 0;
};

/// Immutable after construction, thread-safe.
class Tokenizer {
 public:
  /// Reads a tokenizer.json. Throws Error(weights) naming the member when it is not what this class implements:
  /// normaliser, split pattern, byte level, BPE with ignore_merges, plain added tokens.
  static Tokenizer load(const std::string& path);
  static Tokenizer parse(std::string_view json, const std::string& source);

  /// Number of ids, added tokens included; the model may have more rows.
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  /// Raw bytes; empty for ids without text (out of range, or padding rows).
  std::string_view bytes(int32_t id) const;
  bool has_text(int32_t id) const { return !bytes(id).empty(); }
  bool is_added(int32_t id) const { return flag(id) != 0; }
  /// Control tokens, which no client field ever shows.
  bool is_special(int32_t id) const { return flag(id) == 2; }
  std::optional<int32_t> added_id(std::string_view text) const;
  /// Id of an added token; throws Error(weights) when there is none.
  int32_t require(std::string_view text) const;
  const ChatTokens& chat() const { return chat_; }

  /// Ids of a text in which every added token is recognised.
  std::vector<int32_t> encode(std::string_view text) const;
  /// Ids of the concatenation of pieces; `escape` says what client pieces may not spell.
  std::vector<int32_t> encode(std::span<const TextPiece> pieces, Escape escape) const;
  /// One-shot decoding: what Detokenizer yields in pieces.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

 private:
  struct Added {
    std::string text;
    int32_t id;
    bool special, media;
  };
  explicit Tokenizer(std::unique_ptr<Bpe> bpe);
  uint8_t flag(int32_t id) const { return id >= 0 && id < size() ? flags_[static_cast<size_t>(id)] : uint8_t{0}; }
  void add_token(std::string text, int32_t id, bool special);
  void finish();
  const Added* added_at(std::string_view text, size_t at, bool client, size_t next_change, Escape escape) const;
  std::vector<int32_t> encode_flat(std::string_view text, std::span<const size_t> changes, Escape escape) const;

  std::unique_ptr<Bpe> bpe_;
  std::unique_ptr<Pretokenizer> pretokenizer_;
  std::vector<std::string> tokens_;            ///< by id
  std::vector<uint8_t> flags_;                 ///< by id: 0 ordinary, 1 added, 2 added and special
  std::array<std::vector<Added>, 256> added_;  ///< by first byte, longest first
  TokenMap added_ids_;
  ChatTokens chat_;
};

}  // namespace glm53::text
