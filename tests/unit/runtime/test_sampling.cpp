#include <cmath>
#include <limits>
#include <set>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/runtime/philox.h"
#include "engine/runtime/pools.h"
#include "engine/runtime/sampling.h"

using namespace glm53;

namespace {

const TokenSpace kSpace{.vocab = 40, .text_vocab = 38, .eos = {30, 31}};

wire::Submit request(wire::SamplingParams params) {
  wire::Submit r;
  r.id = 1;
  r.prompt = {1, 2, 2};
  r.seed = 42;
  r.sampling = std::move(params);
  return r;
}

/// The token chosen from `logits` by the CPU operator.
SampleOut choose(const SamplingState& state, std::vector<float> logits) {
  static const auto ops = make_cpu_ops(1);
  logits.resize(static_cast<size_t>(kSpace.vocab), -5.0f);
  OpLimits limits;
  limits.rows = 1;
  limits.vocab = kSpace.vocab;
  ops->reserve(limits);
  const SampleRow row = state.row();
  SampleOut out;
  ops->sample({Tensor::of(logits.data(), Dtype::f32, {1, kSpace.vocab}), kSpace.text_vocab, std::span(&row, 1),
               std::span(&out, 1)});
  return out;
}

wire::SamplingParams at_temperature(float t) {
  wire::SamplingParams p;
  p.temperature = t;
  return p;
}
wire::SamplingParams greedy() {
  return at_temperature(0);
}

}  // namespace

TEST_CASE("Philox4x32-10 gives the published vectors") {
  using A = std::array<uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == A{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr uint32_t f = 0xffffffff;
  CHECK(philox4x32({f, f, f, f}, {f, f}) == A{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        A{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("draws are uniform and depend on seed, position and stream") {
  double sum = 0;
  std::set<double> all;
  for (uint32_t i = 0; i < 4000; ++i) {
    const double u = uniform_draw(7, i, DrawStream::target);
    REQUIRE(u >= 0);
    REQUIRE(u < 1);
    sum += u;
    all.insert(u);
  }
  CHECK(all.size() == 4000);
  CHECK(std::abs(sum / 4000 - 0.5) < 0.02);
  const double u = uniform_draw(7, 3, DrawStream::target);
  CHECK(u == uniform_draw(7, 3, DrawStream::target));
  CHECK(u != uniform_draw(8, 3, DrawStream::target));
  CHECK(u != uniform_draw(7 + (uint64_t{1} << 32), 3, DrawStream::target));
  CHECK(u != uniform_draw(7, 4, DrawStream::target));
  CHECK(u != uniform_draw(7, 3, DrawStream::draft));
}

TEST_CASE("greedy takes the best, ties to the lower id, and never an id without text") {
  const SamplingState state(request(greedy()), kSpace);
  CHECK(choose(state, {0, 3, 3}).token == 1);
  std::vector<float> logits(40, 0.0f);
  logits[39] = 9;
  CHECK(choose(state, logits).token == 0);
}

TEST_CASE("seeded draws repeat, and another seed or position differs somewhere") {
  const std::vector<float> flat(38, 0.0f);
  const auto run = [&](uint64_t seed) {
    wire::Submit r = request(at_temperature(1));
    r.seed = seed;
    SamplingState state(r, kSpace);
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) {
      tokens.push_back(choose(state, flat).token);
      state.accept(tokens.back());
    }
    return tokens;
  };
  const auto a = run(1);
  CHECK(a == run(1));
  CHECK(a != run(2));
  CHECK(std::set<int32_t>(a.begin(), a.end()).size() > 5);
  // Replay: with ten tokens given out already, the rest is the same.
  wire::Submit r = request(at_temperature(1));
  r.seed = 1;
  r.emitted.assign(a.begin(), a.begin() + 10);
  SamplingState replayed(r, kSpace);
  for (size_t i = 10; i < a.size(); ++i) {
    CHECK(choose(replayed, flat).token == a[i]);
    replayed.accept(a[i]);
  }
}

TEST_CASE("allowed, bias, min_tokens and end tokens") {
  wire::SamplingParams p = greedy();
  p.allowed = {5, 33};
  CHECK(choose(SamplingState(request(p), kSpace), {9, 8, 7, 6, 5, 4}).token == 5);
  p = greedy();
  p.bias = {{2, 100.0f}};
  CHECK(choose(SamplingState(request(p), kSpace), {9, 8, 7}).token == 2);
  p = greedy();
  p.min_tokens = 2;
  p.stop_ids = {3};
  SamplingState state(request(p), kSpace);
  std::vector<float> logits(40, 0.0f);
  logits[30] = 9;
  logits[3] = 8;
  logits[7] = 1;
  CHECK(choose(state, logits).token == 7);
  state.accept(7);
  CHECK(choose(state, logits).token == 7);
  state.accept(7);
  CHECK(choose(state, logits).token == 30);
  CHECK(state.stops(30));
  CHECK(state.stops(3));
  CHECK_FALSE(state.stops(7));
  p.ignore_eos = true;
  const SamplingState ignoring(request(p), kSpace);
  CHECK_FALSE(ignoring.stops(30));
  CHECK(ignoring.stops(3));
}

TEST_CASE("penalties count prompt and output as they should") {
  wire::SamplingParams p = greedy();
  p.repetition = 2;  // over prompt and output
  CHECK(choose(SamplingState(request(p), kSpace), {0, 5, 4, 3}).token == 3);
  p = greedy();
  p.frequency = 1;  // over the output only, by count
  SamplingState state(request(p), kSpace);
  CHECK(choose(state, {0, 5, 4, 3}).token == 1);
  state.accept(1);
  state.accept(1);
  CHECK(choose(state, {0, 5, 4, 3.5}).token == 2);
  p = greedy();
  p.presence = 3;  // over the output, once
  SamplingState once(request(p), kSpace);
  once.accept(1);
  once.accept(1);
  CHECK(choose(once, {0, 5, 1, 1.5}).token == 1);
  CHECK(choose(once, {0, 5, 4, 1.5}).token == 2);
}

TEST_CASE("logprobs are of the raw distribution") {
  wire::SamplingParams p = greedy();
  p.logprobs = 2;
  p.bias = {{0, -100.0f}};
  std::vector<float> logits(40, -1e30f);
  logits[0] = std::log(0.75f);
  logits[1] = std::log(0.25f);
  const SampleOut out = choose(SamplingState(request(p), kSpace), logits);
  CHECK(out.token == 1);
  CHECK(out.logprob == doctest::Approx(std::log(0.25f)));
  REQUIRE(out.top.size() == 2);
  CHECK(out.top[0].first == 0);
}

TEST_CASE("bad parameters are named") {
  const auto finding = [](auto change) {
    wire::SamplingParams p;
    change(p);
    return check_sampling(p, kSpace);
  };
  CHECK(finding([](auto&) {}).empty());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(finding([&](auto& p) { p.temperature = nan; }).find("temperature") == 0);
  CHECK(finding([&](auto& p) { p.temperature = -1; }).find("temperature") == 0);
  CHECK(finding([&](auto& p) { p.top_p = 1.5f; }).find("top_p") == 0);
  CHECK(finding([&](auto& p) { p.repetition = 0; }).find("repetition_penalty") == 0);
  CHECK(finding([&](auto& p) { p.allowed = {40}; }).find("allowed_token_ids") == 0);
  CHECK(finding([&](auto& p) { p.stop_ids = {-1}; }).find("stop_token_ids") == 0);
  CHECK(finding([&](auto& p) { p.bias = {{99, 1.0f}}; }).find("logit_bias") == 0);
  CHECK(finding([&](auto& p) { p.bias = {{9, nan}}; }).find("logit_bias") == 0);
}

TEST_CASE("pools give each id once and notice what does not belong") {
  BlockPool pool(1, 3);
  CHECK(pool.take() == BlockId{1});
  CHECK_FALSE(pool.take(3).has_value());
  CHECK(pool.available() == 2);
  const auto two = pool.take(2);
  REQUIRE(two.has_value());
  CHECK_FALSE(pool.take().has_value());
  pool.give(BlockId{2});
  CHECK_THROWS_AS(pool.give(BlockId{2}), Error);
  CHECK_THROWS_AS(pool.give(BlockId::null), Error);
  CHECK_THROWS_AS(pool.give(BlockId{4}), Error);
  CHECK(pool.take() == BlockId{2});
  pool.check(3, "block");
  CHECK_THROWS_AS(pool.check(2, "block"), Error);
}
