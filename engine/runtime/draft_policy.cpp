#include "engine/runtime/draft_policy.h"

#include <algorithm>
#include <cmath>

namespace glm53 {
namespace {

constexpr double kLevel = 0.05;    // of a deviation, that all row counts follow
constexpr double kOwn = 0.15;      // and the one seen, on top
constexpr double kHiccup = 2;      // no step is believed to differ by a larger factor
constexpr double kHopeful = 0.02;  // of a step of one row: what a further row costs, before any was seen
constexpr double kForget = 0.002;  // of the cost of more rows than were seen, by each observation

}  // namespace

void RowCost::observe(int rows, double ms) {
  if (rows < 1 || !(ms > 0) || !std::isfinite(ms)) return;
  const auto at = std::lower_bound(of_.begin(), of_.end(), rows, [](const Entry& e, int r) { return e.rows < r; });
  if (at == of_.end() || at->rows != rows) {
    of_.insert(at, {rows, ms});
    return;
  }
  const double ratio = std::clamp(ms / at->ms, 1 / kHiccup, kHiccup) - 1;
  for (Entry& e : of_) e.ms *= (1 + kLevel * ratio) * (e.rows > rows ? 1 - kForget : 1);
  at->ms *= 1 + kOwn * ratio;
}

double RowCost::at(int rows) const {
  if (of_.empty()) return 0;
  double below = 0;  // the greatest cost of fewer rows: more cannot cost less
  const Entry* last = nullptr;
  for (const Entry& e : of_) {
    if (e.rows > rows) {
      if (last == nullptr) return e.ms * (1 - kHopeful * (e.rows - rows) / e.rows);
      const double upper = std::max(e.ms, below);
      return below + (upper - below) * (rows - last->rows) / (e.rows - last->rows);
    }
    below = std::max(below, e.ms);
    last = &e;
    if (e.rows == rows) return below;
  }
  return below * (1 + kHopeful * (rows - last->rows) / last->rows);
}

void Acceptance::observe(int drafted, int accepted) {
  for (int i = 0; i < std::min({drafted, accepted + 1, kMostDrafts}); ++i) {
    const auto at = static_cast<size_t>(i);
    seen_[at] = std::min(seen_[at] + 1, memory_);
    // The prior counts as one observation.
    rate_[at] += ((i < accepted ? 1.0 : 0.0) - rate_[at]) / (1 + seen_[at]);
  }
}

double Acceptance::expected(int k) const {
  double sum = 0, survival = 1;
  for (int i = 0; i < std::min(k, kMostDrafts); ++i) sum += survival *= at(i);
  return sum;
}

namespace {

struct Candidate {
  double survival;
  size_t offer;
};

/// The drafts of these offers from the likeliest on; as many of them as pay.
DraftChoice best_of(std::span<const DraftOffer> offers, bool model, int rows, int spare, const RowCost& cost,
                    double drafting_ms) {
  std::vector<Candidate> drafts;
  for (size_t i = 0; i < offers.size(); ++i) {
    const DraftOffer& o = offers[i];
    if (o.source == DraftSource::none || (o.source == DraftSource::model && !model)) continue;
    double survival = 1;
    for (int d = 0; d < std::min(o.most, kMostDrafts); ++d) drafts.push_back({survival *= o.rate->at(d), i});
  }
  // Stable: a sequence's drafts stay in order, and equal ones in that of the sequences.
  std::stable_sort(drafts.begin(), drafts.end(),
                   [](const Candidate& a, const Candidate& b) { return a.survival > b.survival; });
  DraftChoice best;
  best.ms = best.ms_without = cost.at(rows);
  best.expected = rows;
  best.drafts.assign(offers.size(), 0);
  const double goal = kWorthwhile * best.expected / best.ms_without;
  double expected = rows, pace = goal;
  size_t taken = 0;
  const size_t most = std::min(drafts.size(), static_cast<size_t>(std::max(spare, 0)));
  bool drafting = false;
  for (size_t n = 0; n < most; ++n) {
    expected += drafts[n].survival;
    drafting = drafting || offers[drafts[n].offer].source == DraftSource::model;
    const double ms = cost.at(rows + static_cast<int>(n) + 1) + (drafting ? drafting_ms : 0);
    if (expected / ms <= pace) continue;
    pace = expected / ms;
    taken = n + 1;
    best.expected = expected;
    best.ms = ms;
  }
  for (size_t n = 0; n < taken; ++n) ++best.drafts[drafts[n].offer];
  return best;
}

}  // namespace

DraftChoice choose_drafts(std::span<const DraftOffer> offers, int rows, int spare, const RowCost& cost,
                          double drafting_ms) {
  if (rows < 1 || !cost.known()) return {std::vector<int>(offers.size(), 0), static_cast<double>(rows), 0, 0};
  const DraftChoice without = best_of(offers, false, rows, spare, cost, drafting_ms);
  const DraftChoice with = best_of(offers, true, rows, spare, cost, drafting_ms);
  return with.expected * without.ms > without.expected * with.ms ? with : without;
}

}  // namespace glm53
