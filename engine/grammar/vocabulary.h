// The tokens of a model as a trie of their bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::grammar {

/// Immutable. Nodes are numbered in preorder, so that a subtree is a range; node 0 is the root.
class Vocabulary {
 public:
  struct Node {
    uint8_t byte = 0;
    uint8_t depth = 0;
    uint16_t tokens = 0;  ///< that end here
    uint32_t first = 0;   ///< of them, in tokens()
    uint32_t end = 0;     ///< behind the subtree
    uint32_t below = 0;   ///< of tokens(): behind those of the subtree
  };
  /// `texts` by id; ids with an empty text, and texts beyond 255 bytes, are never chosen.
  explicit Vocabulary(std::span<const std::string_view> texts);

  int32_t size() const { return static_cast<int32_t>(length_.size()); }
  std::span<const Node> nodes() const { return nodes_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  std::string_view text(int32_t id) const;
  /// The longest token that `text` begins with, -1 when none does.
  int32_t longest(std::string_view text) const;

 private:
  uint32_t child(uint32_t node, uint8_t byte) const;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;
  std::string bytes_;
  std::vector<uint32_t> offset_;
  std::vector<uint8_t> length_;
};

}  // namespace glm53::grammar
