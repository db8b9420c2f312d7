#include "engine/runtime/draft_lookup.h"

#include <algorithm>

namespace glm53 {
namespace {

/// Prompt and output as one text.
struct Text {
  std::span<const int32_t> prompt, output;
  int32_t size() const { return static_cast<int32_t>(prompt.size() + output.size()); }
  int32_t operator[](int32_t i) const {
    const auto at = static_cast<size_t>(i);
    return at < prompt.size() ? prompt[at] : output[at - prompt.size()];
  }
};

uint64_t hash_before(const Text& text, int32_t end) {
  uint64_t h = 0;
  for (int32_t i = end - kLookupShortest; i < end; ++i)
    h = (h ^ static_cast<uint32_t>(text[i])) * 0x9e3779b97f4a7c15u + 0x7f4a7c15u;
  return h;
}

/// How many tokens before both places agree.
int32_t agreement(const Text& text, int32_t a, int32_t b) {
  int32_t n = 0;
  while (n < kLookupLongest && n < a && text[a - 1 - n] == text[b - 1 - n]) ++n;
  return n;
}

}  // namespace

LookupIndex::Found LookupIndex::find(std::span<const int32_t> prompt, std::span<const int32_t> output, int32_t most) {
  const Text text{prompt, output};
  const int32_t size = text.size();
  Found found;
  if (size <= kLookupShortest || most < 1) return found;
  // The end itself is no earlier place: it is entered with the next call.
  for (int32_t end = std::max({indexed_ + 1, kLookupShortest, size - kLookupWindow}); end < size; ++end)
    ends_[hash_before(text, end)] = end;
  indexed_ = size - 1;
  if (ends_.size() > 2 * static_cast<size_t>(kLookupWindow))
    std::erase_if(ends_, [&](const auto& place) { return place.second < size - kLookupWindow; });
  const auto at = ends_.find(hash_before(text, size));
  if (at == ends_.end()) return found;
  found.matched = agreement(text, at->second, size);
  if (found.matched < kLookupShortest) return {};
  // What repeats itself at a shorter distance than that goes on repeating itself.
  const int32_t period = size - at->second;
  for (int32_t i = 0; i < most; ++i) found.tokens.push_back(text[at->second + i % period]);
  return found;
}

}  // namespace glm53
