// Byte-pair encoding of one piece: merges in O(n log n), and a bounded cache of short pieces.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace glm53::text {

/// Hash for look-ups by string_view.
struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const noexcept { return std::hash<std::string_view>{}(s); }
};
using TokenMap = std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>>;

/// Vocabulary and merges, over raw bytes (the byte-level alphabet of tokenizer.json is undone by the loader). encode()
/// is thread-safe.
class Bpe {
 public:
  /// Ids by token bytes. Throws Error(weights) unless each of the 256 bytes is a token.
  explicit Bpe(TokenMap vocab);
  /// The merge of rank `rank`; throws Error(weights) when one of the two or their concatenation is no token.
  void add_merge(std::string_view left, std::string_view right, uint32_t rank);
  /// Appends the ids of a piece: its own id if it is a token (ignore_merges), else the pairs of lowest rank, leftmost
  /// on ties, are merged until none is left.
  void encode(std::string_view piece, std::vector<int32_t>& out) const;
  const TokenMap& vocab() const { return vocab_; }

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };
  void merge(std::string_view piece, std::vector<int32_t>& out) const;
  const Merge* find(int32_t left, int32_t right) const;
  int32_t id_of(std::string_view bytes) const;

  TokenMap vocab_;
  std::array<int32_t, 256> byte_id_{};
  std::unordered_map<uint64_t, Merge> merges_;  ///< by (left id, right id)

  // Pieces of natural text repeat: most look-ups end here.
  struct CacheShard {
    std::mutex mutex;
    std::unordered_map<std::string, std::vector<int32_t>, TextHash, std::equal_to<>> pieces;
  };
  static constexpr size_t kCachedBytes = 64, kShardPieces = 4096;
  mutable std::array<CacheShard, 16> cache_;
};

}  // namespace glm53::text
