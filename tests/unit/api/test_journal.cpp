#include <doctest/doctest.h>

#include "engine/api/journal.h"
#include "tests/unit/api/fixture.h"

using namespace api_test;
using namespace glm53::api;

namespace {

class NoSink final : public RequestSink {
  void on_delta(const wire::Delta&) override {}
  void on_failure(uint64_t, int, const std::string&, uint32_t) override {}
};

wire::Submit submit(uint64_t id, size_t prompt = 3) {
  wire::Submit s;
  s.id = id;
  s.prompt.assign(prompt, 1);
  s.seed = 7;
  return s;
}

wire::Delta delta(uint64_t id, uint32_t index, std::vector<int32_t> tokens, const std::string& finish = "") {
  wire::Delta d;
  d.id = id;
  d.index = index;
  d.tokens = std::move(tokens);
  for (size_t i = 0; i < d.tokens.size(); ++i) d.logprobs.push_back({-1.0f * static_cast<float>(d.tokens[i]), {}});
  d.finish = finish;
  return d;
}

std::vector<uint64_t> ids(const std::vector<wire::Submit>& list) {
  std::vector<uint64_t> out;
  for (const auto& s : list) out.push_back(s.id);
  return out;
}

const auto kSink = std::make_shared<NoSink>();

}  // namespace

TEST_CASE("a request is sent once a generation, with what was emitted") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  journal.add(submit(2, 5), kSink);
  CHECK(journal.waiting() == 2);
  CHECK(journal.waiting_tokens() == 8);
  CHECK(journal.take_unsent("m", false, failures).empty());
  CHECK(ids(journal.take_unsent("m", true, failures)) == std::vector<uint64_t>{1, 2});
  CHECK(journal.take_unsent("m", true, failures).empty());

  CHECK(journal.accept(delta(1, 0, {10, 11})).has_value());
  CHECK(journal.waiting() == 1);
  CHECK(journal.waiting_tokens() == 5);
  CHECK(journal.lost().empty());
  CHECK_FALSE(journal.accept(delta(1, 2, {12})).has_value());  // nobody works on it
  const auto again = journal.take_unsent("m", true, failures);
  REQUIRE(ids(again) == std::vector<uint64_t>{1, 2});
  CHECK(again[0].emitted == std::vector<int32_t>{10, 11});
  CHECK(again[0].seed == 7);
  CHECK(again[1].emitted.empty());
  CHECK(failures.empty());
}

TEST_CASE("repeated tokens are recognised, missing ones are an error") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  journal.take_unsent("m", true, failures);
  journal.accept(delta(1, 0, {10, 11, 12}));
  CHECK_FALSE(journal.accept(delta(1, 1, {11, 12})).has_value());
  const auto fresh = journal.accept(delta(1, 1, {11, 12, 13, 14}));
  REQUIRE(fresh.has_value());
  CHECK(fresh->delta.index == 3);
  CHECK(fresh->delta.tokens == std::vector<int32_t>{13, 14});
  REQUIRE(fresh->delta.logprobs.size() == 2);
  CHECK(fresh->delta.logprobs[0].logprob == -13);
  CHECK_THROWS_AS(journal.accept(delta(1, 6, {1})), glm53::Error);
  const auto last = journal.accept(delta(1, 5, {}, "length"));
  REQUIRE(last.has_value());
  CHECK(last->delta.finish == "length");
  CHECK(journal.unfinished() == 0);
  CHECK_FALSE(journal.accept(delta(1, 5, {9})).has_value());
}

TEST_CASE("two deaths are enough, and only of those that were running") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  journal.take_unsent("m", true, failures);
  CHECK(journal.lost().empty());
  journal.take_unsent("m", true, failures);
  journal.add(submit(2), kSink);  // not sent
  const auto dead = journal.lost();
  REQUIRE(dead.size() == 1);
  CHECK(dead[0].id == 1);
  CHECK(dead[0].status == 500);
  CHECK(journal.unfinished() == 1);
  CHECK(journal.waiting() == 1);
}

TEST_CASE("what is sent again says so, with or without a token") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  CHECK_FALSE(journal.take_unsent("a", true, failures).at(0).replayed);
  journal.lost();
  journal.add(submit(2), kSink);
  const auto again = journal.take_unsent("a", true, failures);
  REQUIRE(again.size() == 2);
  CHECK(again[0].replayed);
  CHECK_FALSE(again[1].replayed);
}

TEST_CASE("canaries pass the gate and are not replayed") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  wire::Submit canary = submit(2);
  canary.key = kCanaryKey;
  journal.add(canary, kSink);
  CHECK(ids(journal.take_unsent("m", false, failures)) == std::vector<uint64_t>{2});
  CHECK(journal.lost().size() == 1);
  CHECK(journal.unfinished() == 1);
}

TEST_CASE("another model does not continue what this one began") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  journal.take_unsent("m", true, failures);
  journal.add(submit(2), kSink);
  journal.lost();
  CHECK(ids(journal.take_unsent("other", true, failures)) == std::vector<uint64_t>{2});
  REQUIRE(failures.size() == 1);
  CHECK(failures[0].id == 1);
  CHECK(failures[0].status == 503);
}

TEST_CASE("removal says whether the rank must be told") {
  Journal journal;
  std::vector<Journal::Failure> failures;
  journal.add(submit(1), kSink);
  CHECK_FALSE(journal.remove(1));
  journal.add(submit(2), kSink);
  journal.take_unsent("m", true, failures);
  CHECK(journal.remove(2));
  CHECK_FALSE(journal.remove(2));
  CHECK(journal.waiting() == 0);
  CHECK(journal.waiting_tokens() == 0);
  journal.add(submit(3), kSink);
  CHECK(journal.fail_all(503, "x").size() == 1);
  CHECK(journal.waiting() == 0);
}
