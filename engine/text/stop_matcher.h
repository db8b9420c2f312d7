// Stop strings, found across token boundaries.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::text {

inline constexpr size_t kMaxStopStrings = 64;
inline constexpr size_t kMaxStopBytes = 4096;

/// Finds the occurrence that begins first in the text; of those that begin at the same place, the earlier entry. The
/// result does not depend on how the text is cut. Text is held back only while it may belong to an occurrence.
/// Knuth-Morris-Pratt for each string: linear time.
class StopMatcher {
 public:
  StopMatcher() = default;
  /// Strings must not be empty; throws Error(usage) for more than kMaxStopStrings or one longer than kMaxStopBytes.
  explicit StopMatcher(std::vector<std::string> strings, bool include_in_output = false);

  struct Match {
    size_t string = 0;  ///< index
    size_t begin = 0;   ///< bytes of text before it
  };
  /// Appends to `out` what may be shown. After a match nothing more comes out.
  std::optional<Match> push(std::string_view text, std::string& out);
  /// Text that is shown without being searched (min_tokens not reached).
  void pass(std::string_view text, std::string& out);
  /// End of the text: shows what was held back, unless an occurrence is in it.
  std::optional<Match> finish(std::string& out);
  /// Something else follows before the text goes on: like finish(), and nothing matches across.
  std::optional<Match> interrupt(std::string& out);
  const std::string& string(size_t index) const { return patterns_[index].text; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t> border;  ///< of every prefix
    size_t matched = 0;          ///< bytes of the longest prefix that ends the text
  };
  bool settled() const;
  size_t begin_of(const Pattern& p) const { return seen_ - p.matched; }
  std::optional<Match> settle(std::string& out);

  std::vector<Pattern> patterns_;
  bool include_ = false, done_ = false;
  std::string held_;           ///< the last bytes of the text, not shown yet
  size_t seen_ = 0;            ///< bytes of the text so far
  std::optional<Match> best_;  ///< found, but an earlier one is still possible
};

}  // namespace glm53::text
