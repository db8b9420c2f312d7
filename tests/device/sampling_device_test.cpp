// Sampling on the device against the CPU's, which unit_kernels holds against f64.
#include <deque>
#include <limits>
#include <map>
#include <random>

#include <doctest/doctest.h>

#include "tests/device/device.h"

using namespace glm53;
using namespace glm53::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Rows of logits and settings that own their lists.
struct Case {
  int64_t vocab = 0;
  int text_vocab = 0;
  std::vector<float> logits;  // [rows][vocab]
  std::vector<SampleRow> rows;
  std::deque<std::vector<uint32_t>> allowed;
  std::deque<std::vector<int32_t>> banned;
  std::deque<std::vector<std::pair<int32_t, float>>> bias;
  std::deque<std::vector<std::pair<int32_t, int32_t>>> seen;
};

std::vector<SampleOut> sample(Ops& ops, const Case& c, Tensor logits) {
  std::vector<SampleOut> out(c.rows.size());
  ops.sample({.logits = logits, .text_vocab = c.text_vocab, .rows = c.rows, .out = out});
  return out;
}
std::vector<SampleOut> on_host(const Case& c) {
  std::vector<float> logits = c.logits;
  const auto ops = make_cpu_ops(2);
  return sample(*ops, c, Tensor::of(logits.data(), Dtype::f32, {static_cast<int64_t>(c.rows.size()), c.vocab}));
}
std::vector<SampleOut> on_device(const Case& c) {
  Device d;
  std::vector<float> logits = c.logits;
  return sample(d.ops(), c,
                d.put(Tensor::of(logits.data(), Dtype::f32, {static_cast<int64_t>(c.rows.size()), c.vocab})));
}

/// Peaked as a model's, with ties where `steps` rounds values.
Case random_case(int64_t vocab, int rows, unsigned seed, float spread, float steps) {
  Case c;
  c.vocab = vocab;
  c.text_vocab = static_cast<int>(vocab - vocab / 50);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto id = [&] { return below(static_cast<int>(vocab)); };
  for (int r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < vocab; ++i) {
      const float v = normal(random);
      c.logits.push_back(steps > 0 ? std::round(v * steps) / steps : v);
    }
    SampleRow row;
    row.temperature = below(4) == 0 ? 0 : 0.3F + 0.1F * static_cast<float>(below(12));
    row.top_p = below(2) == 0 ? 1 : 0.5F + 0.05F * static_cast<float>(below(10));
    row.min_p = below(3) == 0 ? 0.02F : 0;
    row.top_k = below(3) == 0 ? 1 + below(100) : 0;
    row.u = std::uniform_real_distribution<double>(0, 1)(random);
    row.top_logprobs = below(3) == 0 ? below(21) : -1;
    if (below(3) == 0) {
      auto& bits = c.allowed.emplace_back(static_cast<size_t>((vocab + 31) / 32 - below(3)));
      for (uint32_t& b : bits) b = static_cast<uint32_t>(random() | random());
      row.allowed = bits;
    }
    if (below(3) == 0) row.banned = c.banned.emplace_back(std::vector<int32_t>{id(), id(), -5, 1 << 30});
    if (below(3) == 0) row.bias = c.bias.emplace_back(std::vector<std::pair<int32_t, float>>{{id(), 9.5F}, {7, -kInf}});
    if (below(3) == 0) {
      row.presence = 0.4F;
      row.frequency = 0.2F;
      row.repetition = 1.3F;
      std::map<int32_t, int32_t> times;
      for (int i = 0; i < 700; ++i) times[id()] = below(4);
      row.seen = c.seen.emplace_back(times.begin(), times.end());
    }
    c.rows.push_back(row);
  }
  return c;
}

/// Different tokens only where rounding of a sum may decide, which is rare.
void check_alike(const Case& c, int most_different) {
  const std::vector<SampleOut> want = on_host(c), got = on_device(c);
  int different = 0;
  for (size_t r = 0; r < want.size(); ++r) {
    CAPTURE(r);
    REQUIRE(got[r].top.size() == want[r].top.size());
    for (size_t i = 0; i < want[r].top.size(); ++i) {
      CHECK(got[r].top[i].first == want[r].top[i].first);
      CHECK(got[r].top[i].second == doctest::Approx(want[r].top[i].second).epsilon(1e-4));
    }
    if (got[r].token != want[r].token) {
      ++different;
      CHECK(c.rows[r].temperature > 0);
      continue;
    }
    if (want[r].token >= 0) CHECK(got[r].logprob == doctest::Approx(want[r].logprob).epsilon(1e-4));
  }
  CHECK(different <= most_different);
}

}  // namespace

TEST_CASE("sampling: tokens, logprobs and best lists of the device are the host's") {
  for (const auto& [vocab, rows] : {std::pair{154880, 40}, std::pair{2700, 200}, std::pair{97, 200}, std::pair{1, 3}}) {
    CAPTURE(vocab);
    check_alike(random_case(vocab, rows, static_cast<unsigned>(vocab), 3, 0), vocab > 1000 ? 1 : 0);
    check_alike(random_case(vocab, rows, static_cast<unsigned>(vocab) + 1, 3, 4), 1);  // many ties
  }
}

TEST_CASE("sampling: nearly flat rows, whose choice may lie behind the list") {
  Case c = random_case(154880, 24, 5, 0.01F, 0);
  for (SampleRow& row : c.rows) {
    row.temperature = 1;
    row.min_p = 0;
    row.top_k = 0;
    row.allowed = {};
  }
  check_alike(c, 1);
}

TEST_CASE("sampling: nonsense in logits, and nothing to choose from") {
  Case c = random_case(5000, 6, 9, 2, 0);
  for (SampleRow& row : c.rows) row = SampleRow{.temperature = 0.7F, .u = 0.5, .top_logprobs = 3};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < 5000; ++i) {
    c.logits[static_cast<size_t>(i)] = nan;  // row 0: nothing is left
    if (i % 3 == 0) c.logits[static_cast<size_t>(5000 + i)] = nan;
    if (i != 17) c.logits[static_cast<size_t>(10000 + i)] = -kInf;  // row 2: one token
  }
  c.logits[15000 + 40] = kInf;  // row 3: one is infinitely better
  c.rows[4].allowed = c.allowed.emplace_back(157, 0U);
  c.rows[5].temperature = 0;
  const auto got = on_device(c);
  CHECK(got[0].token == -1);
  CHECK(got[2].token == 17);
  CHECK(got[2].top.size() == 1);
  CHECK(got[3].token == 40);
  CHECK(got[4].token == -1);
  check_alike(c, 0);
}

TEST_CASE("sampling: the same rows give the same bits, alone and among others") {
  const Case c = random_case(154880, 8, 77, 3, 0);
  const auto all = on_device(c), again = on_device(c);
  for (size_t r = 0; r < c.rows.size(); ++r) {
    CHECK(all[r].token == again[r].token);
    CHECK(all[r].logprob == again[r].logprob);
    Case one;
    one.vocab = c.vocab;
    one.text_vocab = c.text_vocab;
    one.logits.assign(c.logits.begin() + static_cast<int64_t>(r) * c.vocab,
                      c.logits.begin() + static_cast<int64_t>(r + 1) * c.vocab);
    one.rows = {c.rows[r]};
    const auto alone = on_device(one);
    CHECK(alone[0].token == all[r].token);
    CHECK(alone[0].logprob == all[r].logprob);
    CHECK(alone[0].top == all[r].top);
  }
}
