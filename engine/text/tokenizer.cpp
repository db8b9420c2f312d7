#include "engine/text/tokenizer.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "common/strings.h"
#include "engine/text/detokenizer.h"

namespace glm53::text {

namespace {

bool is_media(std::string_view text) {
  return text == "<|begin_of_image|>" || text == "<|end_of_image|>" || text == "<|begin_of_video|>" ||
         text == "<|end_of_video|>" || text == "<|image|>" || text == "<|video|>";
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Bpe> bpe) : bpe_(std::move(bpe)), pretokenizer_(std::make_unique<Pretokenizer>()) {
  for (const auto& [text, id] : bpe_->vocab()) {
    if (tokens_.size() <= static_cast<size_t>(id)) tokens_.resize(static_cast<size_t>(id) + 1);
    tokens_[static_cast<size_t>(id)] = text;
  }
  flags_.resize(tokens_.size());
}

void Tokenizer::add_token(std::string text, int32_t id, bool special) {
  const auto i = static_cast<size_t>(id);
  if (tokens_.size() <= i) {
    tokens_.resize(i + 1);
    flags_.resize(i + 1);
  }
  if (flags_[i] != 0 || (!tokens_[i].empty() && tokens_[i] != text)) {
    throw Error(Code::weights, cat("tokenizer: added token ", text, " has id ", id, ", which is taken"));
  }
  if (!added_ids_.try_emplace(text, id).second) {
    throw Error(Code::weights, cat("tokenizer: added token ", text, " is listed twice"));
  }
  tokens_[i] = text;
  flags_[i] = special ? 2 : 1;
  const auto first = static_cast<unsigned char>(text[0]);
  const bool media = is_media(text);
  added_[first].push_back({std::move(text), id, special, media});
}

void Tokenizer::finish() {
  for (auto& bucket : added_) {
    std::stable_sort(bucket.begin(), bucket.end(),
                     [](const Added& a, const Added& b) { return a.text.size() > b.text.size(); });
  }
  chat_ = {require("<|system|>"), require("<|user|>"),   require("<|assistant|>"), require("<|observation|>"),
           require("<think>"),    require("</think>"),   require("<tool_call>"),   require("</tool_call>"),
           require("<arg_key>"),  require("</arg_key>"), require("<arg_value>"),   require("</arg_value>")};
}

std::string_view Tokenizer::bytes(int32_t id) const {
  return id >= 0 && id < size() ? std::string_view(tokens_[static_cast<size_t>(id)]) : std::string_view();
}

std::optional<int32_t> Tokenizer::added_id(std::string_view text) const {
  const auto found = added_ids_.find(text);
  return found == added_ids_.end() ? std::nullopt : std::optional(found->second);
}

int32_t Tokenizer::require(std::string_view text) const {
  if (const auto id = added_id(text)) return *id;
  throw Error(Code::weights, cat("tokenizer: the added token ", text, " is missing"),
              "use the tokenizer.json of a GLM-5.3 checkpoint");
}

// The longest added token at a position. A token that may not come from a client is passed over when any of its bytes
// does.
const Tokenizer::Added* Tokenizer::added_at(std::string_view text, size_t at, bool client, size_t next_change,
                                            Escape escape) const {
  for (const Added& token : added_[static_cast<unsigned char>(text[at])]) {
    if (text.compare(at, token.text.size(), token.text) != 0) continue;
    const bool escaped = escape != Escape::none && (token.media || (token.special && escape == Escape::control));
    if (escaped && (client || at + token.text.size() > next_change)) continue;
    return &token;
  }
  return nullptr;
}

// `changes`: ascending positions at which markup turns into client text and back, starting as markup.
std::vector<int32_t> Tokenizer::encode_flat(std::string_view text, std::span<const size_t> changes,
                                            Escape escape) const {
  std::vector<int32_t> ids;
  const auto ordinary = [&](size_t begin, size_t end) {
    pretokenizer_->split(text.substr(begin, end - begin), [&](std::string_view piece) { bpe_->encode(piece, ids); });
  };
  size_t begin = 0, change = 0;
  for (size_t at = 0; at < text.size();) {
    if (added_[static_cast<unsigned char>(text[at])].empty()) {
      ++at;
      continue;
    }
    while (change < changes.size() && changes[change] <= at) ++change;
    const size_t next = change < changes.size() ? changes[change] : text.size();
    const Added* token = added_at(text, at, change % 2 == 1, next, escape);
    if (token == nullptr) {
      ++at;
      continue;
    }
    ordinary(begin, at);
    ids.push_back(token->id);
    at += token->text.size();
    begin = at;
  }
  ordinary(begin, text.size());
  return ids;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  return encode_flat(text, {}, Escape::none);
}

std::vector<int32_t> Tokenizer::encode(std::span<const TextPiece> pieces, Escape escape) const {
  std::string flat;
  std::vector<size_t> changes;
  bool markup = true;
  for (const TextPiece& piece : pieces) {
    if (piece.text.empty()) continue;
    if (piece.markup != markup) changes.push_back(flat.size());
    markup = piece.markup;
    flat += piece.text;
  }
  return encode_flat(flat, changes, escape);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string out;
  Detokenizer detokenizer(*this, skip_special);
  for (const int32_t id : ids) detokenizer.push(id, out);
  detokenizer.finish(out);
  return out;
}

}  // namespace glm53::text
