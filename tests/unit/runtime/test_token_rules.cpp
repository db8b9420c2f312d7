#include <random>
#include <set>
#include <string>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/runtime/sampling.h"
#include "engine/runtime/token_rules.h"

using namespace glm53;

namespace {

const TokenSpace kSpace{.vocab = 40, .text_vocab = 40, .eos = {30, 31}};
// 10 </think>, 11 <tool_call>, 12 </tool_call>, 13 <arg_key>; names 1 2 and 1 2 3 and 4.
const std::string kCalls = "call 11 12 13\nname 1 2\nname 1 2 3\nname 4\n";
const std::string kThink = "reasoning\nthink_end 10\n";

using Set = std::set<int32_t>;

Set allowed(const TokenRules& rules) {
  std::vector<uint32_t> bits(2);
  rules.mask(bits);
  Set out;
  for (int32_t id = 0; id < kSpace.vocab; ++id)
    if ((bits[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) out.insert(id);
  return out;
}
/// What may come behind these tokens.
Set behind(const std::string& text, const std::vector<int32_t>& tokens) {
  TokenRules rules(text, kSpace);
  for (const int32_t token : tokens) {
    REQUIRE(allowed(rules).count(token) == 1);
    REQUIRE(rules.try_accept(token));
  }
  return allowed(rules);
}
Set all_but(const Set& without) {
  Set out;
  for (int32_t id = 0; id < kSpace.vocab; ++id)
    if (without.count(id) == 0) out.insert(id);
  return out;
}

}  // namespace

TEST_CASE("token rules: calls are forced, names are declared ones, values are free") {
  CHECK(behind(kCalls, {}) == Set{11});
  CHECK(behind(kCalls, {11}) == Set{1, 4});
  CHECK(behind(kCalls, {11, 1}) == Set{2});
  CHECK(behind(kCalls, {11, 1, 2}) == Set{3, 12, 13});
  CHECK(behind(kCalls, {11, 1, 2, 3}) == Set{12, 13});
  CHECK(behind(kCalls, {11, 4, 13}) == all_but({30, 31}));
  CHECK(behind(kCalls, {11, 4, 13, 20, 21, 12}) == Set{11, 30, 31});
  CHECK(behind(kCalls, {11, 4, 12, 11}) == Set{1, 4});
  CHECK(behind(kCalls, {11, 4, 13, 20, 11}) == Set{1, 4});
  CHECK(behind(kCalls + "single\n", {11, 4, 12}) == Set{30, 31});
  CHECK(behind(kCalls + "single\n", {11, 4, 13}) == all_but({11, 30, 31}));
}

TEST_CASE("B22: rules begin behind the reasoning, which a call or the budget ends") {
  CHECK(behind(kThink + kCalls, {}) == all_but({30, 31}));
  CHECK(behind(kThink + kCalls, {5, 6, 10}) == Set{11});
  CHECK(behind(kThink + kCalls, {5, 11}) == Set{1, 4});
  CHECK(behind(kThink + "budget 2\n", {5}) == all_but({}));
  CHECK(behind(kThink + "budget 2\n", {5, 6}) == Set{10});
  CHECK(behind(kThink + "budget 2\n", {5, 6, 10}) == all_but({}));
  CHECK(behind(kThink + "budget 0\n" + kCalls, {}) == Set{10});
}

TEST_CASE("token rules: a choice of texts") {
  const std::string choice = "choice 1 2\nchoice 1 2 3\nchoice 7\n";
  CHECK(behind(choice, {}) == Set{1, 7});
  CHECK(behind(choice, {1, 2}) == Set{3, 30, 31});
  CHECK(behind(choice, {7}) == Set{30, 31});
  CHECK(behind(choice + "alternative 11\n", {}) == Set{1, 7, 11});
  CHECK(behind(choice + "alternative 11\n", {11, 30}) == all_but({}));
  CHECK(behind(kThink + choice, {1}) == all_but({30, 31}));
}

TEST_CASE("token rules: words that must not come") {
  const std::string bad = "bad 5\nbad 6 7\nbad 6 6 8\n";
  CHECK(behind(bad, {}) == all_but({5}));
  CHECK(behind(bad, {6}) == all_but({5, 7}));
  CHECK(behind(bad, {6, 6}) == all_but({5, 7, 8}));
  CHECK(behind(bad, {6, 1}) == all_but({5}));
}

TEST_CASE("token rules: what the mask allows is what is accepted, and rollback undoes it") {
  std::mt19937 random(3);
  for (const std::string& text : {kCalls, kThink + kCalls + "budget 3\n", kCalls + "single\n",
                                  std::string("choice 1 2\nchoice 1 5\nalternative 9\n")}) {
    TokenRules rules(text, kSpace);
    std::vector<Set> before;
    for (int i = 0; i < 40; ++i) {
      before.push_back(allowed(rules));
      REQUIRE_FALSE(before.back().empty());
      for (int32_t id = 0; id < kSpace.vocab; ++id) {
        const bool accepted = rules.try_accept(id);
        REQUIRE(accepted == (before.back().count(id) == 1));
        if (accepted) rules.rollback(1);
      }
      REQUIRE(allowed(rules) == before.back());
      auto at = before.back().begin();
      std::advance(at, static_cast<long>(random() % before.back().size()));
      REQUIRE(rules.try_accept(*at));
    }
    while (!before.empty()) {
      rules.rollback(1);
      REQUIRE(allowed(rules) == before.back());
      before.pop_back();
    }
    CHECK_FALSE(rules.try_accept(-1));
    CHECK_FALSE(rules.try_accept(kSpace.vocab));
  }
}

TEST_CASE("token rules: wrong ones are refused with their line") {
  CHECK(check_rules("", kSpace).empty());
  CHECK(check_rules(kThink + kCalls, kSpace).empty());
  for (const char* text :
       {"what 1", "name", "name 40", "name -1", "name x", "call 1 2", "call 1 2 3", "name 1", "single 1", "reasoning",
        "budget 5", "think_end 1 2", "bad", "call 1 2 3\nname 4\nchoice 5"}) {
    CAPTURE(text);
    CHECK_FALSE(check_rules(text, kSpace).empty());
  }
  CHECK(check_rules("reasoning\nname 99", kSpace).find("line 2") != std::string::npos);
}

TEST_CASE("rules and the tokens a client allows hold together, and go on behind tokens given out before") {
  wire::Submit r;
  r.prompt = {1};
  r.grammar = kCalls;
  r.emitted = {11, 1};
  r.sampling.min_tokens = 100;
  r.sampling.allowed = {2, 3, 12};
  SamplingState state(r, kSpace);
  const auto bits = [&] { return std::vector<uint32_t>(state.row().allowed.begin(), state.row().allowed.end()); };
  CHECK(bits() == std::vector<uint32_t>{1u << 2, 0});
  state.accept(2);
  CHECK(bits() == std::vector<uint32_t>{1u << 3 | 1u << 12, 0});
  CHECK_FALSE(state.row().banned.empty());
  r.grammar = kCalls + "single\n";
  r.emitted = {11, 4, 12};
  r.sampling.allowed.clear();
  const SamplingState over(r, kSpace);
  CHECK(over.row().banned.empty());  // nothing but an end can follow, min_tokens or not
}
