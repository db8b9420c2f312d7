#include <random>
#include <set>
#include <string>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/grammar/compile.h"
#include "engine/runtime/sampling.h"
#include "engine/runtime/token_rules.h"
#include "tests/unit/text/tiny.h"

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

namespace {

TokenSpace tiny_space() {
  TokenSpace space{.vocab = tiny().size(),
                   .text_vocab = tiny().size(),
                   .eos = {tiny().require("<|endoftext|>"), tiny().chat().user}};
  space.grammars = std::make_shared<grammar::Cache>(grammar::vocabulary_of(tiny()));
  return space;
}
using Bits = std::vector<uint32_t>;
Bits bits_of(const TokenRules& rules) {
  Bits bits((static_cast<size_t>(tiny().size()) + 31) / 32);
  rules.mask(bits);
  return bits;
}
bool may(const TokenRules& rules, int32_t token) {
  return (bits_of(rules)[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
}
bool take(TokenRules& rules, std::string_view text) {
  for (const int32_t token : tiny().encode(text))
    if (!may(rules, token) || !rules.try_accept(token)) return false;
  return true;
}

const std::string kObject =
    R"(grammar {"content": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}})"
    "\n";

}  // namespace

TEST_CASE("B22: a grammar begins behind the reasoning; the budget and end tokens go with it") {
  const TokenSpace space = tiny_space();
  const std::string think = "reasoning\nthink_end " + std::to_string(tiny().chat().think_end) + "\n";
  TokenRules rules(kObject + think + "budget 4\n", space);
  CHECK(may(rules, tiny().chat().think_end));
  CHECK_FALSE(may(rules, space.eos[0]));
  CHECK(rules.try_accept(tiny().encode("x")[0]));
  CHECK(rules.try_accept(tiny().chat().think_end));
  CHECK_FALSE(may(rules, tiny().chat().think));
  CHECK_FALSE(may(rules, tiny().encode("x")[0]));
  CHECK_FALSE(may(rules, space.eos[0]));
  CHECK(take(rules, "{\"a\": 12"));
  CHECK_FALSE(may(rules, space.eos[0]));
  CHECK_FALSE(rules.terminated());
  CHECK(take(rules, "}"));
  CHECK(rules.terminated());
  for (const int32_t end : space.eos) CHECK(may(rules, end));
  CHECK_FALSE(rules.try_accept(tiny().encode("x")[0]));
  CHECK(rules.try_accept(space.eos[1]));
}

TEST_CASE("a grammar row by row: drafts that are taken back leave everything as it was") {
  const TokenSpace space = tiny_space();
  TokenRules rules("grammar {\"content\": {\"json_object\": true}}\n", space);
  std::mt19937 random(5);
  for (int step = 0; step < 120 && !rules.terminated(); ++step) {
    const Bits before = bits_of(rules);
    int drafts = 0;
    for (; drafts < 7; ++drafts) {
      const auto token = static_cast<int32_t>(random() % static_cast<uint32_t>(tiny().size()));
      const bool allowed = may(rules, token);
      if (rules.try_accept(token) != allowed) FAIL("mask and acceptance differ for token ", token);
      if (!allowed) break;
    }
    rules.rollback(drafts);
    CHECK(bits_of(rules) == before);
    int32_t token = 0;
    do token = static_cast<int32_t>(random() % static_cast<uint32_t>(tiny().size()));
    while (!may(rules, token));
    CHECK(rules.try_accept(token));
  }
}

TEST_CASE("a grammar of calls: instead of the content, out of the reasoning, and within free text") {
  const TokenSpace space = tiny_space();
  const text::ChatTokens& t = tiny().chat();
  std::string markup;
  for (const int32_t id : {t.tool_call, t.tool_call_end, t.arg_key, t.arg_key_end, t.arg_value, t.arg_value_end})
    markup += (markup.empty() ? "" : ", ") + std::to_string(id);
  const std::string calls =
      "\"calls\": \"one\", \"markup\": [" + markup +
      R"(], "tools": [{"name": "f", "strict": true, "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}])";
  const std::string opens = "opens " + std::to_string(t.tool_call) + "\n";
  const std::string think = "reasoning\nthink_end " + std::to_string(t.think_end) + "\n";
  const std::string good = "<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>";
  {
    TokenRules rules("grammar {\"content\": {\"regex\": \"yes\"}, " + calls + "}\n" + opens, space);
    CHECK(take(rules, good));
    CHECK(rules.terminated());
    rules.rollback(100);
    CHECK(take(rules, "yes"));
    CHECK(rules.terminated());
  }
  {
    TokenRules rules("grammar {" + calls + "}\n" + opens + think, space);
    CHECK(rules.try_accept(tiny().encode("x")[0]));
    CHECK(take(rules, good));
    CHECK(rules.terminated());
  }
  TokenRules rules("grammar {" + calls + "}\n" + opens + "within\n", space);
  CHECK(may(rules, space.eos[0]));
  CHECK(take(rules, "some words " + good + " and more" + good));
  CHECK(may(rules, space.eos[0]));
  CHECK(take(rules, "<tool_call>f<arg_key>n</arg_key><arg_value>"));
  CHECK_FALSE(may(rules, tiny().encode("x")[0]));
  CHECK_FALSE(may(rules, space.eos[0]));
  CHECK(check_rules("within\n", space).find("within") != std::string::npos);
  CHECK(check_rules("grammar {\"content\": {\"regex\": \"(\"}}\n", space).find("not closed") != std::string::npos);
  CHECK(check_rules("grammar {}\n", kSpace).find("tokenizer.json") != std::string::npos);
}
