#include "engine/prefix/chain_hash.h"

#include <algorithm>

#include "common/bytes.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"

namespace glm53::prefix {
namespace {

ChainHash hash_of(const std::vector<std::byte>& message) {
  const std::string hex = sha256_hex({reinterpret_cast<const char*>(message.data()), message.size()});
  const auto digit = [](char c) { return static_cast<unsigned>(c <= '9' ? c - '0' : c - 'a' + 10); };
  ChainHash hash{};
  for (size_t i = 0; i < hash.size(); ++i)
    hash[i] = static_cast<uint8_t>(digit(hex[2 * i]) << 4 | digit(hex[2 * i + 1]));
  return hash;
}

}  // namespace

ChainHash chain_root(const CacheIdentity& identity, std::string_view salt) {
  ByteWriter w;
  w.put(identity.model_revision);
  w.put(identity.weights_digest);
  w.put(identity.kv_format);
  w.put(identity.kpool);
  w.put(identity.topk);
  w.put(std::string(salt));
  return hash_of(w.take());
}

ChainHash chain_next(const ChainHash& before, const Slice& slice) {
  if (slice.tokens.empty() || slice.size() > kBlockTokens)
    throw Error(Code::internal, cat("hash of a block of ", slice.size(), " tokens"));
  ByteWriter w;
  for (const uint8_t b : before) w.put(b);
  for (const int32_t t : slice.tokens) w.put(static_cast<uint32_t>(t));
  for (const MediaPart& m : slice.media) {
    w.put(m.first);
    w.put(m.count);
    w.put(m.skip);
    // Whole words, so that only a partial block's message has an odd length.
    std::string digest = m.digest;
    w.put(static_cast<uint32_t>(digest.size()));
    digest.resize((digest.size() + 3) / 4 * 4);
    for (const char c : digest) w.put(c);
  }
  if (slice.size() < kBlockTokens) w.put(static_cast<uint8_t>(slice.size()));
  return hash_of(w.take());
}

std::vector<ChainHash> chain_of(const ChainHash& root, const Prefix& prefix) {
  std::vector<ChainHash> chain;
  const auto size = static_cast<int32_t>(prefix.tokens.size());
  for (int32_t begin = 0; begin < size; begin += kBlockTokens) {
    const int32_t count = std::min<int32_t>(kBlockTokens, size - begin);
    const auto media = media_of_block(prefix.media, begin, count);
    const auto tokens = prefix.tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
    chain.push_back(chain_next(chain.empty() ? root : chain.back(), {0, tokens, media}));
  }
  return chain;
}

std::string to_text(const ChainHash& hash) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const uint8_t b : hash) {
    out += kDigits[b >> 4];
    out += kDigits[b & 15];
  }
  return out;
}

}  // namespace glm53::prefix
