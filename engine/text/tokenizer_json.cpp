// Reading tokenizer.json. Everything the encoder relies on is checked, so that another tokenizer is refused, not
// misread.
#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

namespace glm53::text {

namespace {

// Sorted members: objects of 150,000 members are looked up, never printed.
using Json = nlohmann::json;

constexpr int64_t kMaxId = 1 << 24;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(Code::weights, cat("tokenizer: ", what), "use the tokenizer.json of a GLM-5.3 checkpoint");
}

void expect(bool ok, std::string_view what) {
  if (!ok) refuse(std::string(what));
}

const Json& member(const Json& object, const char* key, std::string_view where) {
  const auto found = object.find(key);
  if (found == object.end()) refuse(cat(where, key, " is missing"));
  return *found;
}

bool false_or_absent(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() || *found == false;
}

/// Code point of the byte-level alphabet -> byte; -1 = none. Printable bytes stand for themselves, the others follow
/// from U+0100.
std::array<int16_t, 0x144> byte_alphabet() {
  std::array<int16_t, 0x144> to_byte{};
  to_byte.fill(-1);
  int16_t next = 0x100;
  for (int16_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    to_byte[static_cast<size_t>(printable ? b : next++)] = b;
  }
  return to_byte;
}

class Alphabet {
 public:
  std::string to_bytes(std::string_view token, std::string_view where) const {
    std::string out;
    for (size_t i = 0; i < token.size();) {
      const CodePoint c = code_point_at(token, i);
      i += c.bytes;
      if (c.value >= to_byte_.size() || to_byte_[c.value] < 0) refuse(cat(where, " ", token, " is not byte-level"));
      out += static_cast<char>(static_cast<unsigned char>(to_byte_[c.value]));
    }
    return out;
  }

 private:
  std::array<int16_t, 0x144> to_byte_ = byte_alphabet();
};

void check_pre_tokenizer(const Json& root) {
  const Json& pre = member(root, "pre_tokenizer", "");
  expect(pre.is_object() && pre.value("type", "") == "Sequence", "pre_tokenizer is not a Sequence");
  const Json& parts = member(pre, "pretokenizers", "pre_tokenizer.");
  expect(parts.is_array() && parts.size() == 2, "pre_tokenizer does not have two parts, Split and ByteLevel");
  const Json& split = parts[0];
  expect(split.value("type", "") == "Split" && split.value("behavior", "") == "Isolated" &&
             false_or_absent(split, "invert"),
         "pre_tokenizer[0] is not an isolating Split");
  const Json& pattern = member(split, "pattern", "pre_tokenizer[0].");
  if (!pattern.is_object() || pattern.value("Regex", "") != kSplitPattern) {
    refuse(cat("pre_tokenizer[0].pattern is not ", kSplitPattern));
  }
  const Json& level = parts[1];
  expect(level.value("type", "") == "ByteLevel" && false_or_absent(level, "add_prefix_space") &&
             level.value("use_regex", true) == false,
         "pre_tokenizer[1] is not ByteLevel without prefix space and regex");
}

void check_frame(const Json& root) {
  expect(root.is_object(), "the file is not an object");
  expect(!root.contains("normalizer") || root["normalizer"].is_null(), "normalizer is not null");
  check_pre_tokenizer(root);
  const auto post = root.find("post_processor");
  expect(post == root.end() || post->is_null() || (post->is_object() && post->value("type", "") == "ByteLevel"),
         "post_processor is not ByteLevel");
  const Json& decoder = member(root, "decoder", "");
  expect(decoder.is_object() && decoder.value("type", "") == "ByteLevel", "decoder is not ByteLevel");
  const Json& model = member(root, "model", "");
  expect(model.is_object() && model.value("type", "") == "BPE", "model.type is not BPE");
  expect(model.value("ignore_merges", false), "model.ignore_merges is not true");
  expect(false_or_absent(model, "byte_fallback"), "model.byte_fallback is not false");
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto found = model.find(key);
    const bool plain = found == model.end() || found->is_null() ||
                       (found->is_string() && found->get_ref<const std::string&>().empty());
    if (!plain) refuse(cat("model.", key, " is set"));
  }
}

std::unique_ptr<Bpe> read_model(const Json& model) {
  const Alphabet alphabet;
  const Json& vocab = member(model, "vocab", "model.");
  expect(vocab.is_object(), "model.vocab is not an object");
  TokenMap tokens;
  tokens.reserve(vocab.size());
  std::vector<bool> used;
  for (const auto& [text, id] : vocab.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxId) {
      refuse(cat("model.vocab: the id of ", text, " is no id"));
    }
    const auto i = id.get<size_t>();
    if (used.size() <= i) used.resize(i + 1);
    if (used[i]) refuse(cat("model.vocab: id ", i, " is used twice"));
    used[i] = true;
    tokens.try_emplace(alphabet.to_bytes(text, "model.vocab:"), static_cast<int32_t>(i));
  }
  auto bpe = std::make_unique<Bpe>(std::move(tokens));
  const Json& merges = member(model, "merges", "model.");
  expect(merges.is_array(), "model.merges is not an array");
  uint32_t rank = 0;
  for (const Json& m : merges) {
    std::string left, right;
    if (m.is_array() && m.size() == 2 && m[0].is_string() && m[1].is_string()) {
      left = m[0].get<std::string>();
      right = m[1].get<std::string>();
    } else if (m.is_string() && m.get_ref<const std::string&>().find(' ') != std::string::npos) {
      const auto& both = m.get_ref<const std::string&>();
      left = both.substr(0, both.find(' '));
      right = both.substr(both.find(' ') + 1);
    } else {
      refuse(cat("model.merges[", rank, "] is neither [\"a\",\"b\"] nor \"a b\""));
    }
    bpe->add_merge(alphabet.to_bytes(left, "model.merges:"), alphabet.to_bytes(right, "model.merges:"), rank++);
  }
  return bpe;
}

}  // namespace

Tokenizer Tokenizer::parse(std::string_view json, const std::string& source) {
  try {
    const Json root = Json::parse(json);
    check_frame(root);
    Tokenizer tokenizer(read_model(root["model"]));
    const Json& added = member(root, "added_tokens", "");
    expect(added.is_array(), "added_tokens is not an array");
    for (const Json& t : added) {
      const auto text = t.value("content", "");
      const auto id = t.value("id", int64_t{-1});
      if (text.empty() || id < 0 || id >= kMaxId) refuse("an entry of added_tokens has no content or no id");
      if (!false_or_absent(t, "lstrip") || !false_or_absent(t, "rstrip") || !false_or_absent(t, "single_word")) {
        refuse(cat("added token ", text, " strips or needs word boundaries"));
      }
      tokenizer.add_token(text, static_cast<int32_t>(id), t.value("special", false));
    }
    tokenizer.finish();
    return tokenizer;
  } catch (const Json::exception& e) {
    throw Error(Code::weights, cat(source, ": ", e.what()), "the file is damaged; fetch it again");
  } catch (const Error& e) {
    throw e.within(source);
  }
}

Tokenizer Tokenizer::load(const std::string& path) {
  return parse(read_file(path), path);
}

}  // namespace glm53::text
