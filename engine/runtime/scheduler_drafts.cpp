// Which drafts are verified in a step, and what came of them. The policy stands in scheduler.cpp.
#include <algorithm>

#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

constexpr int kOwnMemory = 8;           // drafts of one request that count
constexpr uint64_t kProbe = 64;         // every so many steps a sequence without drafts tries some
constexpr int32_t kProbeDrafts = 2;     // so many
constexpr int32_t kCollapse = 400;      // verifications of the drafter's drafts with next to none accepted
constexpr int32_t kCollapseShare = 50;  // of them an accepted draft makes up for

}  // namespace

Scheduler::Sequence Scheduler::fresh() {
  Sequence seq;
  seq.drafting.by_lookup = Acceptance::like(all_lookup_, kOwnMemory);
  seq.drafting.by_model = Acceptance::like(all_model_, kOwnMemory);
  seq.serial = ++serial_;
  return seq;
}

/// Drafts behind the newest token for which there are rows, output and blocks.
int32_t Scheduler::most_drafts(const Sequence& s) const {
  const int32_t output = s.max_output - static_cast<int32_t>(s.output.size()) - 1;
  int32_t most = std::min({output, limits_.max_context - s.total(), limits_.max_window - 1});
  if (limits_.reuse_output == ReuseOutput::always) most = std::min(most, kChunk - s.computed % kChunk - 1);
  return std::max(most, 0);
}

/// The better of what the sequence's text and the drafter have to offer.
DraftOffer Scheduler::offer(Sequence& s) {
  Drafting& d = s.drafting;
  d.source = DraftSource::none;
  d.count = 0;
  d.tokens.clear();
  // With more than one token ahead its text is known already.
  if (!s.request.speculate || s.reread || s.total() - s.computed != 1) return {};
  const int32_t most = most_drafts(s);
  DraftOffer model, lookup;
  if (const int32_t n = std::min(most, limits_.model_drafts); n > 0 && !drafter_paused_)
    model = {DraftSource::model, n, &d.by_model};
  if (const int32_t n = std::min(most, limits_.lookup_drafts); n > 0) {
    LookupIndex::Found found = d.lookup.find(s.request.prompt, s.output, n);
    d.tokens = std::move(found.tokens);
    if (!d.tokens.empty()) lookup = {DraftSource::lookup, static_cast<int>(d.tokens.size()), &d.by_lookup};
  }
  const auto expected = [](const DraftOffer& o) { return o.rate == nullptr ? 0 : o.rate->expected(o.most); };
  return expected(lookup) >= expected(model) ? lookup : model;
}

/// `windows`: sequences and the rows of known tokens that they have in this step.
void Scheduler::choose_drafts(std::span<const std::pair<Sequence*, int32_t>> windows, int32_t spare, Flight& flight) {
  std::vector<DraftOffer> offers;
  offers.reserve(windows.size());
  int passes = 0;
  for (const auto& [s, rows] : windows) {
    offers.push_back(limits_.lookup_drafts + limits_.model_drafts > 0 ? offer(*s) : DraftOffer{});
    if (offers.back().source != DraftSource::model) continue;
    passes = limits_.chained_drafter ? std::max(passes, offers.back().most) : passes + 1;
  }
  DraftChoice choice = glm53::choose_drafts(offers, flight.window_rows, spare, window_cost_, drafter_cost_.at(passes));
  const bool probe = step_ % kProbe == 0;
  for (size_t i = 0; i < windows.size(); ++i) {
    Sequence& s = *windows[i].first;
    const DraftOffer& o = offers[i];
    int32_t count = std::min(choice.drafts[i], spare);
    if (limits_.always_draft) count = std::min(o.most, spare);
    if (count == 0 && probe) count = std::min({o.most, kProbeDrafts, spare});
    // The rows need blocks; nobody is put back for their sake.
    const auto blocks = [](int32_t tokens) { return static_cast<size_t>((tokens + kBlockTokens - 1) / kBlockTokens); };
    while (count > 0 && !cache_.grow(s.cache, blocks(s.total() + count))) --count;
    if (count <= 0) continue;
    spare -= count;
    s.drafting.source = o.source;
    s.drafting.count = count;
    if (o.source == DraftSource::lookup) s.drafting.tokens.resize(static_cast<size_t>(count));
    if (o.source == DraftSource::model)
      flight.drafter_passes =
          limits_.chained_drafter ? std::max(flight.drafter_passes, count) : flight.drafter_passes + 1;
    flight.window_rows += count;
  }
}

/// Accepted drafts have been computed with the rows in front of them.
void Scheduler::take_drafts(Sequence& s, Part& part, const SeqResult& result) {
  if (result.drafted == 0) return;
  part.end += result.accepted;
  s.computed += result.accepted;
  s.pending = static_cast<int16_t>(s.pending + result.accepted);
  const SamplingState* state = sampling_.find(s.request.id);
  // Behind a token that ends the request nothing was refused.
  const bool ends = result.tokens.back().token < 0 || (state != nullptr && state->stops(result.tokens.back().token));
  const int drafted = ends ? result.accepted : result.drafted;
  const bool model = s.drafting.source == DraftSource::model;
  (model ? s.drafting.by_model : s.drafting.by_lookup).observe(drafted, result.accepted);
  (model ? all_model_ : all_lookup_).observe(drafted, result.accepted);
  s.drafting.drafted += static_cast<uint32_t>(result.drafted);
  s.drafting.accepted += static_cast<uint32_t>(result.accepted);
  ++drafts_.steps;
  drafts_.drafted += static_cast<uint64_t>(result.drafted);
  drafts_.accepted += static_cast<uint64_t>(result.accepted);
  for (int16_t i = 0; i < result.accepted; ++i) ++drafts_.at[static_cast<size_t>(i)];
  if (model) watch_acceptance(result);
}

/// Next to no text is so hard that nothing is ever accepted: the drafter belongs to another model, or is broken.
void Scheduler::watch_acceptance(const SeqResult& result) {
  collapsed_ += 1;
  if (result.accepted > 0) collapsed_ = std::max(collapsed_ - kCollapseShare * result.accepted, 0);
  if (collapsed_ >= kCollapse) drafter_paused_ = true;
}

}  // namespace glm53
