#include "engine/prefix/prefix_tree.h"

#include <algorithm>
#include <compare>

namespace glm53::prefix {
namespace {

/// What row `row` shows, as far as it is not a token.
struct Shown {
  const std::string* digest = nullptr;
  int32_t row = 0;
};

Shown shown_at(std::span<const MediaPart> media, int32_t row) {
  for (const MediaPart& m : media)
    if (row >= m.first && row < m.first + m.count) return {&m.digest, m.skip + row - m.first};
  return {};
}

std::strong_ordering compare(const Shown& a, const Shown& b) {
  if (a.digest == nullptr || b.digest == nullptr) return (a.digest != nullptr) <=> (b.digest != nullptr);
  if (const int order = a.digest->compare(*b.digest); order != 0) return order <=> 0;
  return a.row <=> b.row;
}

}  // namespace

std::vector<MediaPart> media_of_block(std::span<const Media> media, int32_t begin, int32_t count) {
  std::vector<MediaPart> parts;
  for (const Media& m : media) {
    const int32_t from = std::max(begin, m.begin), to = std::min(begin + count, m.begin + m.count);
    if (from < to) parts.push_back({from - begin, to - from, from - m.begin, m.digest});
  }
  return parts;
}

Comparison compare(const Slice& a, const Slice& b) {
  const auto [at, bt] = std::mismatch(a.tokens.begin(), a.tokens.end(), b.tokens.begin(), b.tokens.end());
  const auto common = static_cast<int>(at - a.tokens.begin());
  if (!a.media.empty() || !b.media.empty())
    for (int row = 0; row < common; ++row)
      if (const auto order = compare(shown_at(a.media, row), shown_at(b.media, row)); std::is_neq(order))
        return {row, order};
  if (at != a.tokens.end() && bt != b.tokens.end()) return {common, *at <=> *bt};
  return {common, a.tokens.size() <=> b.tokens.size()};
}

bool NodeLess::operator()(const Node* a, const Node* b) const {
  return (*this)(a->slice(), b);
}
bool NodeLess::operator()(const Node* a, const Slice& b) const {
  return a->origin != b.origin ? a->origin < b.origin : std::is_lt(compare(a->slice(), b).order);
}
bool NodeLess::operator()(const Slice& a, const Node* b) const {
  return a.origin != b->origin ? a.origin < b->origin : std::is_lt(compare(a, b->slice()).order);
}

Snapshot* Node::snapshot_at(int offset) {
  for (Snapshot& s : snaps)
    if (s.offset == offset) return &s;
  return nullptr;
}

}  // namespace glm53::prefix
