// Drafts copied from the request's own text: what followed the last time that its newest tokens stood there.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace glm53 {

/// Index of one request's text. Costs time once for each token, and memory for the newest kLookupWindow of them.
class LookupIndex {
 public:
  /// What followed the newest earlier place of the text's last tokens, at most `most` tokens; `matched`: how many last
  /// tokens that place shares with the end, at most kLookupLongest. Nothing where fewer than kLookupShortest do.
  struct Found {
    std::vector<int32_t> tokens;
    int32_t matched = 0;
  };
  /// `prompt` and `output` are the text; both only ever grow, the prompt not at all.
  Found find(std::span<const int32_t> prompt, std::span<const int32_t> output, int32_t most);

 private:
  std::unordered_map<uint64_t, int32_t> ends_;  // hash of kLookupShortest tokens -> position behind their newest place
  int32_t indexed_ = 0;                         // places that end here or before are known
};

inline constexpr int32_t kLookupShortest = 3;      ///< tokens that must agree
inline constexpr int32_t kLookupLongest = 16;      ///< that are compared
inline constexpr int32_t kLookupWindow = 1 << 17;  ///< newest tokens in which places are looked for

}  // namespace glm53
