#include "engine/grammar/vocabulary.h"

#include <algorithm>
#include <numeric>

namespace glm53::grammar {

Vocabulary::Vocabulary(std::span<const std::string_view> texts) : offset_(texts.size()), length_(texts.size()) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < texts.size(); ++i) {
    offset_[i] = static_cast<uint32_t>(bytes_.size());
    if (texts[i].empty() || texts[i].size() > 255) continue;
    length_[i] = static_cast<uint8_t>(texts[i].size());
    bytes_ += texts[i];
    order.push_back(static_cast<int32_t>(i));
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const std::string_view x = texts[static_cast<size_t>(a)], y = texts[static_cast<size_t>(b)];
    return x != y ? x < y : a < b;
  });
  tokens_ = order;
  nodes_.emplace_back();
  std::vector<uint32_t> path{0};  // of the last token, root first
  std::string_view last;
  const auto close = [&](size_t depth) {
    while (path.size() > depth + 1) {
      nodes_[path.back()].end = static_cast<uint32_t>(nodes_.size());
      path.pop_back();
    }
  };
  for (size_t k = 0; k < order.size(); ++k) {
    const std::string_view word = texts[static_cast<size_t>(order[k])];
    const auto same =
        static_cast<size_t>(std::mismatch(last.begin(), last.end(), word.begin(), word.end()).first - last.begin());
    close(same);
    for (size_t d = same; d < word.size(); ++d) {
      path.push_back(static_cast<uint32_t>(nodes_.size()));
      Node node;
      node.byte = static_cast<uint8_t>(word[d]);
      node.depth = static_cast<uint8_t>(d + 1);
      node.first = static_cast<uint32_t>(k);
      nodes_.push_back(node);
    }
    ++nodes_[path.back()].tokens;
    last = word;
  }
  close(0);
  nodes_[0].end = static_cast<uint32_t>(nodes_.size());
  // Tokens below a node end where those of the next node behind its subtree begin.
  for (Node& n : nodes_) n.below = n.end < nodes_.size() ? nodes_[n.end].first : static_cast<uint32_t>(tokens_.size());
}

std::string_view Vocabulary::text(int32_t id) const {
  if (id < 0 || id >= size()) return {};
  const auto i = static_cast<size_t>(id);
  return std::string_view(bytes_).substr(offset_[i], length_[i]);
}

uint32_t Vocabulary::child(uint32_t node, uint8_t byte) const {
  for (uint32_t c = node + 1; c < nodes_[node].end; c = nodes_[c].end)
    if (nodes_[c].byte == byte) return c;
  return 0;
}

int32_t Vocabulary::longest(std::string_view text) const {
  int32_t best = -1;
  uint32_t node = 0;
  for (const char c : text) {
    node = child(node, static_cast<uint8_t>(c));
    if (node == 0) break;
    if (nodes_[node].tokens > 0) best = tokens_[nodes_[node].first];
  }
  return best;
}

}  // namespace glm53::grammar
