// Parts of speculation: drafts from a request's text, what drafts cost and bring, rows behind drafts.
#include <algorithm>
#include <limits>
#include <random>

#include <doctest/doctest.h>

#include "engine/runtime/draft_lookup.h"
#include "engine/runtime/draft_policy.h"
#include "engine/runtime/sampling.h"

using namespace glm53;

namespace {

using Tokens = std::vector<int32_t>;

/// Milliseconds of a step: a part for the step, and one for each row.
RowCost line(double step, double row) {
  RowCost cost;
  for (int round = 0; round < 40; ++round)
    for (const int rows : {1, 2, 4, 8, 16}) cost.observe(rows, step + row * rows);
  return cost;
}

Acceptance always(double rate) {
  return {rate, 8};
}

}  // namespace

TEST_CASE("lookup: what followed the last time that the newest tokens stood there") {
  LookupIndex index;
  const Tokens prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  Tokens output = {40, 41};
  CHECK(index.find(prompt, output, 5).tokens.empty());
  output.insert(output.end(), {2, 3, 4});
  const auto found = index.find(prompt, output, 3);
  CHECK(found.tokens == Tokens{5, 6, 7});
  CHECK(found.matched == 3);
  // The newest place counts: 3 4 5 was followed by 6 once, by 50 later.
  output.insert(output.end(), {5, 50, 3, 4, 5});
  CHECK(index.find(prompt, output, 2).tokens == Tokens{50, 3});
  CHECK(index.find(prompt, output, 0).tokens.empty());
}

TEST_CASE("lookup: text that repeats itself goes on repeating itself") {
  LookupIndex index;
  const Tokens prompt = {7, 8, 7, 8, 7, 8};
  CHECK(index.find(prompt, {}, 5).tokens == Tokens{7, 8, 7, 8, 7});
  LookupIndex same;
  CHECK(same.find(Tokens{9, 9, 9, 9}, {}, 4).tokens == Tokens{9, 9, 9, 9});
  LookupIndex other;
  CHECK(other.find(Tokens{9, 9, 9}, {}, 4).tokens.empty());
}

TEST_CASE("lookup: an index that grew with the text finds what a fresh one finds") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto below = [&](uint64_t n) { return static_cast<int32_t>(random() % n); };
    Tokens prompt(static_cast<size_t>(below(40))), output;
    for (int32_t& t : prompt) t = below(3);
    LookupIndex grown;
    for (int step = 0; step < 30; ++step) {
      for (int n = 1 + below(4); n > 0; --n) output.push_back(below(3));
      LookupIndex fresh;
      const auto a = grown.find(prompt, output, 8), b = fresh.find(prompt, output, 8);
      CHECK(a.tokens == b.tokens);
      CHECK(a.matched == b.matched);
      if (a.tokens.empty()) continue;
      Tokens text = prompt;
      text.insert(text.end(), output.begin(), output.end());
      const auto m = static_cast<size_t>(a.matched);
      // Somewhere before, the last m tokens are followed by the first draft.
      Tokens wanted(text.end() - static_cast<std::ptrdiff_t>(m), text.end());
      wanted.push_back(a.tokens[0]);
      const auto at = std::search(text.begin(), text.end(), wanted.begin(), wanted.end());
      CHECK(at != text.end());
    }
  }
}

TEST_CASE("the cost of rows: learned, between what was seen interpolated, never falling") {
  const RowCost cost = line(10, 1);
  CHECK(cost.at(4) == doctest::Approx(14).epsilon(0.05));
  CHECK(cost.at(6) == doctest::Approx(16).epsilon(0.05));
  for (int rows = 1; rows < 40; ++rows) CHECK(cost.at(rows) <= cost.at(rows + 1));
  RowCost fresh;
  CHECK_FALSE(fresh.known());
  fresh.observe(1, 10);
  CHECK(fresh.at(8) < 12);  // so that it is tried
  fresh.observe(8, 30);
  CHECK(fresh.at(8) == 30);
  // A step that something else disturbed is forgotten, whether that size runs again or not.
  for (int i = 0; i < 2000; ++i) fresh.observe(1, 10);
  CHECK(fresh.at(8) < 15);
  for (const double ms : {-1.0, 0.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    fresh.observe(1, ms);
  CHECK(fresh.at(1) == doctest::Approx(10));
}

TEST_CASE("acceptance by position follows what was verified, and nothing behind the first refusal") {
  Acceptance a(0.5, 8);
  for (int i = 0; i < 60; ++i) a.observe(4, 2);
  CHECK(a.at(0) > 0.99);
  CHECK(a.at(1) > 0.99);
  CHECK(a.at(2) < 0.01);
  CHECK(a.at(3) == 0.5);
  CHECK(a.expected(4) == doctest::Approx(2).epsilon(0.02));
  a.observe(0, 0);
  a.observe(100, 100);
  CHECK(a.at(kMostDrafts - 1) > 0.5);
}

TEST_CASE("drafts are chosen by price") {
  const Acceptance sure = always(0.95), poor = always(0.2);
  const auto one = [](const Acceptance& rate, int most, DraftSource source = DraftSource::lookup) {
    return std::vector<DraftOffer>{{source, most, &rate}};
  };
  // A further row costs a tenth of a step: sure drafts pay all the way, poor ones only the first.
  const RowCost cheap = line(10, 1), dear = line(0, 10);
  CHECK(choose_drafts(one(sure, 7), 1, 100, cheap, 0).drafts == std::vector<int>{7});
  CHECK(choose_drafts(one(poor, 7), 1, 100, cheap, 0).drafts == std::vector<int>{1});
  // Where each row costs a step nothing pays.
  CHECK(choose_drafts(one(sure, 7), 1, 100, dear, 0).drafts == std::vector<int>{0});
  CHECK(choose_drafts(one(sure, 7), 1, 3, cheap, 0).drafts == std::vector<int>{3});
  CHECK(choose_drafts(one(sure, 7), 1, 100, RowCost(), 0).drafts == std::vector<int>{0});
  // The drafter's own time counts, but not for copied text.
  CHECK(choose_drafts(one(poor, 7, DraftSource::model), 1, 100, cheap, 5).drafts == std::vector<int>{0});
  CHECK(choose_drafts(one(sure, 7, DraftSource::model), 1, 100, cheap, 5).drafts == std::vector<int>{7});
  const std::vector<DraftOffer> both = {{DraftSource::model, 7, &poor}, {DraftSource::lookup, 7, &sure}, {}};
  CHECK(choose_drafts(both, 3, 100, cheap, 20).drafts == std::vector<int>{0, 7, 0});
}

TEST_CASE("a choice is the best one: no other number of drafts gives more tokens a millisecond") {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 300; ++round) {
    const RowCost cost = line(1 + 20 * unit(random), 2 * unit(random));
    const Acceptance a = always(unit(random)), b = always(unit(random));
    const int most = 1 + static_cast<int>(random() % 5);
    const std::vector<DraftOffer> offers = {{DraftSource::lookup, most, &a}, {DraftSource::model, most, &b}};
    const double drafting = 5 * unit(random);
    const DraftChoice choice = choose_drafts(offers, 2, 100, cost, drafting);
    const auto pace = [&](int i, int j) {
      return (2 + a.expected(i) + b.expected(j)) / (cost.at(2 + i + j) + (j > 0 ? drafting : 0));
    };
    double best = 0;
    for (int i = 0; i <= most; ++i)
      for (int j = 0; j <= most; ++j) best = std::max(best, pace(i, j));
    CHECK(pace(choice.drafts[0], choice.drafts[1]) >= best / kWorthwhile - 1e-9);
  }
}

namespace {

const TokenSpace kSpace{.vocab = 40, .text_vocab = 40, .eos = {30}};

std::vector<std::pair<int32_t, int32_t>> sorted(std::span<const std::pair<int32_t, int32_t>> seen) {
  std::vector<std::pair<int32_t, int32_t>> all(seen.begin(), seen.end());
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace

TEST_CASE("rows behind drafts are those that there would be had the drafts been accepted") {
  std::mt19937_64 random(11);
  const auto below = [&](uint64_t n) { return static_cast<int32_t>(random() % n); };
  for (int round = 0; round < 500; ++round) {
    wire::Submit r;
    r.seed = random();
    for (int i = below(6); i > 0; --i) r.prompt.push_back(below(40));
    r.prompt.push_back(1);
    r.sampling.temperature = below(2) == 0 ? 0.0F : 0.8F;
    if (below(2) == 0) r.sampling.presence = 0.5F;
    r.sampling.min_tokens = below(6);
    if (below(2) == 0) r.sampling.allowed = {1, 2, 3, 4, 5, 6, 7, 30};
    if (below(2) == 0) r.grammar = "bad 3 4\n";
    // A choice that is demanded from the end of reasoning on, which a draft (7) may be; 6 is what is accepted below.
    if (below(3) == 0) r.grammar = "reasoning\nthink_end 7\nbudget 9\nchoice 2 3\nchoice 2 5 1\n";
    SamplingState state(r, kSpace);
    for (int step = 0; step < 4; ++step) {
      Tokens drafts;
      for (int i = below(6); i > 0; --i) drafts.push_back(below(8));
      const std::span<const SampleRow> rows = state.rows(drafts);
      REQUIRE(!rows.empty());
      REQUIRE(rows.size() <= drafts.size() + 1);
      wire::Submit so_far = r;
      so_far.emitted = Tokens(static_cast<size_t>(step), 6);
      for (size_t i = 0; i < rows.size(); ++i) {
        const SamplingState there(so_far, kSpace);
        const SampleRow wanted = there.row();
        CHECK(rows[i].u == wanted.u);
        CHECK(rows[i].temperature == wanted.temperature);
        CHECK(std::equal(rows[i].allowed.begin(), rows[i].allowed.end(), wanted.allowed.begin(), wanted.allowed.end()));
        CHECK(std::equal(rows[i].banned.begin(), rows[i].banned.end(), wanted.banned.begin(), wanted.banned.end()));
        CHECK(sorted(rows[i].seen) == sorted(wanted.seen));
        if (i < drafts.size()) so_far.emitted.push_back(drafts[i]);
      }
      state.accept(6);
    }
  }
}
