// Which drafts pay: how likely each is accepted, against what a further row of the step costs (performance §3.3).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace glm53 {

inline constexpr int kMostDrafts = 15;  ///< of one sequence in one step; a window has one row more

/// Milliseconds of a step by the number of its rows, learned from steps that ran. Between row counts that were seen it
/// interpolates; beyond them it supposes that a row costs little, so that larger steps are tried. What has not been
/// seen for long is supposed to have become cheaper than more rows were, so that it is tried again.
class RowCost {
 public:
  void observe(int rows, double ms);
  bool known() const { return !of_.empty(); }
  /// Never falls with more rows; 0 while nothing is known.
  double at(int rows) const;

 private:
  struct Entry {
    int rows;
    double ms;
  };
  std::vector<Entry> of_;  // by rows
};

/// How often the draft at each position was accepted where the one before it was, of one source of drafts.
class Acceptance {
 public:
  /// `prior`: what is supposed before anything is seen; `memory`: how many observations count.
  Acceptance(double prior, int memory) : memory_(memory) { rate_.fill(prior); }
  /// For one request: begins with what is known of all.
  static Acceptance like(const Acceptance& all, int memory) {
    Acceptance own = all;
    own.memory_ = memory;
    own.seen_.fill(0);
    return own;
  }
  void observe(int drafted, int accepted);
  /// Given that all before it are accepted; position counts from 0.
  double at(int position) const { return rate_[static_cast<size_t>(position)]; }
  /// Expected accepted drafts of k.
  double expected(int k) const;

 private:
  int memory_;
  std::array<double, kMostDrafts> rate_{};
  std::array<int, kMostDrafts> seen_{};
};

/// Where drafts come from.
enum class DraftSource : uint8_t { none, lookup, model };

/// Drafts that a sequence could have verified in a step.
struct DraftOffer {
  DraftSource source = DraftSource::none;
  int most = 0;
  const Acceptance* rate = nullptr;
};

/// What a step would be with no drafts, and the best one.
struct DraftChoice {
  std::vector<int> drafts;  ///< of each offer
  double expected = 0;      ///< tokens of the step
  double ms = 0;            ///< of the step; 0 = not known
  double ms_without = 0;    ///< of the step without drafts
};

/// Chooses how many drafts of each offer are verified beside `rows` rows that run anyway, so that the step gives most
/// tokens a millisecond; none where that is not better than without by kWorthwhile. `drafting_ms`: what the drafter
/// takes, if any offer of DraftSource::model is used. At most `spare` drafts altogether.
DraftChoice choose_drafts(std::span<const DraftOffer> offers, int rows, int spare, const RowCost& cost,
                          double drafting_ms);

inline constexpr double kWorthwhile = 1.02;

}  // namespace glm53
