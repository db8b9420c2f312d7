// Sampling against frontend §6 written out with full sorts in f64.
#include <map>
#include <numeric>
#include <set>

#include "tests/unit/kernels/weights.h"

namespace glm53::test {
namespace {

using Pairs = std::vector<std::pair<int32_t, float>>;
using Counts = std::vector<std::pair<int32_t, int32_t>>;

SampleOut draw(const Floats& logits, const SampleRow& row, int text_vocab = 1 << 30) {
  Floats z = logits;
  std::vector<SampleOut> out(1);
  const auto ops = make_cpu_ops(1);
  ops->sample({.logits = tensor(z, {1, static_cast<int64_t>(z.size())}),
               .text_vocab = text_vocab,
               .rows = std::span(&row, 1),
               .out = out});
  return out[0];
}

/// Tokens that some u of a fine grid reaches, with how often.
std::map<int32_t, int> reached(const Floats& logits, SampleRow row, int steps = 4000) {
  Floats z(logits.size() * at(steps));
  std::vector<SampleRow> rows;
  std::vector<SampleOut> out(at(steps));
  for (int i = 0; i < steps; ++i) {
    std::copy(logits.begin(), logits.end(), z.begin() + static_cast<int64_t>(logits.size()) * i);
    row.u = (i + 0.5) / steps;
    rows.push_back(row);
  }
  make_cpu_ops(2)->sample({.logits = tensor(z, {steps, static_cast<int64_t>(logits.size())}),
                           .text_vocab = 1 << 30,
                           .rows = rows,
                           .out = out});
  std::map<int32_t, int> count;
  for (const SampleOut& o : out) ++count[o.token];
  return count;
}

std::set<int32_t> ids(const std::map<int32_t, int>& count) {
  std::set<int32_t> s;
  for (const auto& [id, n] : count) s.insert(id);
  return s;
}

struct Oracle {
  int32_t token = -1;
  double logprob = 0, doubt = 1;  ///< doubt: distance of u·mass to the nearest step of the CDF, relative
};

/// The eight steps on f64 logits.
Oracle oracle(const Floats& logits, const SampleRow& row, int text_vocab) {
  const auto n = static_cast<int32_t>(logits.size());
  Doubles z(logits.begin(), logits.end());
  for (int32_t i = 0; i < n; ++i) {
    const bool open = row.allowed.empty() || (row.allowed[at(i / 32)] >> (i % 32) & 1u) != 0;
    if (i >= text_vocab || !open) z[at(i)] = -INFINITY;
  }
  const Doubles raw = z;
  for (const int32_t id : row.banned) z[at(id)] = -INFINITY;
  for (const auto& [id, b] : row.bias) z[at(id)] += static_cast<double>(b);
  for (const auto& [id, times] : row.seen) {
    double& v = z[at(id)];
    v = v > 0 ? v / static_cast<double>(row.repetition) : v * static_cast<double>(row.repetition);
    if (times > 0) v -= static_cast<double>(row.frequency) * times + static_cast<double>(row.presence);
  }
  Ints order(at(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[at(a)] > z[at(b)]; });
  const auto softmax = [](const Doubles& v) {
    const double top = *std::max_element(v.begin(), v.end());
    Doubles p(v.size());
    double sum = 0;
    for (size_t i = 0; i < v.size(); ++i) sum += p[i] = std::exp(v[i] - top);
    for (double& x : p) x /= sum;
    return p;
  };
  Oracle o;
  const auto report = [&](int32_t id) {
    o.token = id;
    o.logprob = std::log(softmax(raw)[at(id)]);
    return o;
  };
  if (row.temperature == 0) return report(order[0]);
  for (double& v : z) v /= static_cast<double>(row.temperature);
  Doubles p = softmax(z);
  const double best = *std::max_element(p.begin(), p.end());
  for (int32_t i = 0; i < n; ++i) {
    if (p[at(i)] < static_cast<double>(row.min_p) * best) z[at(i)] = -INFINITY;
  }
  if (row.top_k > 0 && row.top_k < n) {
    const double kth = z[at(order[at(row.top_k - 1)])];
    for (double& v : z) v = v < kth ? -INFINITY : v;
  }
  p = softmax(z);
  double sum = 0;
  size_t kept = 0;
  while (kept < at(n) && p[at(order[kept])] > 0) {
    sum += p[at(order[kept++])];
    if (row.top_p < 1) o.doubt = std::min(o.doubt, std::fabs(sum - static_cast<double>(row.top_p)));
    if (row.top_p < 1 && sum >= static_cast<double>(row.top_p)) break;
  }
  double cumulative = 0;
  for (size_t i = 0; i < kept; ++i) {
    cumulative += p[at(order[i])];
    o.doubt = std::min(o.doubt, std::fabs(cumulative - row.u * sum));
    if (cumulative > row.u * sum) return report(order[i]);
  }
  return report(order[kept - 1]);
}

TEST_CASE("every parameter at once, against the oracle") {
  Random random(1);
  int doubtful = 0, different = 0, greedy = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int n = random.between(2, 300), text = random.between(2, n);
    const Floats z = random.normals(n, 3.0f);
    std::vector<uint32_t> allowed(at((n + 31) / 32), 0);
    for (uint32_t& w : allowed) w = static_cast<uint32_t>(random.between(0, 0x7fffffff)) * 2654435761u;
    allowed[0] |= 3;
    Ints banned = {1};
    Pairs bias;
    Counts seen;
    for (int i = 0; i < 6; ++i) {
      bias.emplace_back(random.between(0, n - 1), 2 * random.normal());
      seen.emplace_back(random.between(0, n - 1), random.between(0, 3));
    }
    SampleRow row;
    const auto maybe = [&](float off, float on) { return random.between(0, 1) == 0 ? off : on; };
    row.temperature = maybe(maybe(0.0f, 1.0f), 0.3f + std::fabs(random.normal()));
    row.top_p = maybe(1.0f, 0.01f * static_cast<float>(random.between(1, 99)));
    row.min_p = maybe(0.0f, 0.003f * static_cast<float>(random.between(1, 99)));
    row.presence = maybe(0.0f, random.normal());
    row.frequency = maybe(0.0f, random.normal());
    row.repetition = maybe(1.0f, 0.5f + std::fabs(random.normal()));
    row.top_k = random.between(-1, 20);
    row.u = random.between(0, 1 << 20) / static_cast<double>((1 << 20) + 1);
    if (random.between(0, 1) == 0) row.allowed = allowed;
    if (random.between(0, 1) == 0) row.banned = banned;
    row.bias = bias;
    row.seen = seen;
    const Oracle want = oracle(z, row, text);
    if (want.doubt < 1e-5) {
      ++doubtful;
      continue;
    }
    greedy += row.temperature == 0;
    const SampleOut got = draw(z, row, text);
    different += got.token != want.token || std::fabs(static_cast<double>(got.logprob) - want.logprob) > 1e-5;
  }
  CHECK(different == 0);
  CHECK(doubtful < 30);
  CHECK(greedy > 300);
}

TEST_CASE("greedy: lowest id on ties, filters ignored") {
  SampleRow row{.temperature = 0, .top_p = 0.01f, .u = 0.999};
  CHECK(draw({1, 3, 3, 2}, row).token == 1);
  CHECK(draw({-1, -1, -1}, row).token == 0);
  row.top_k = 1;
  row.min_p = 1;
  CHECK(draw({1, 3, 4, 2}, row).token == 2);
}

TEST_CASE("masks: text vocabulary, allowed bits, banned tokens") {
  const Floats z = {5, 4, 3, 2, 9, 10};
  SampleRow row{.temperature = 0};
  CHECK(draw(z, row, 4).token == 0);
  CHECK(draw(z, row, 5).token == 4);
  const std::vector<uint32_t> bits = {0b101100};
  row.allowed = bits;
  CHECK(draw(z, row).token == 5);
  CHECK(draw(z, row, 5).token == 2);
  const Ints banned = {5};
  row.banned = banned;
  CHECK(draw(z, row).token == 2);
  const std::vector<uint32_t> short_mask = {0xffffffffu};  // 40 tokens, bits for 32: the rest is closed
  Floats wide(40, 0.0f);
  wide[35] = 7;
  row = {.temperature = 0, .allowed = short_mask};
  CHECK(draw(wide, row).token == 0);
}

TEST_CASE("logprobs come from the raw distribution after the first step") {
  const Floats z = {1, 2, 3, 4, 50};
  const Pairs bias = {{0, 100.0f}};
  const Ints banned = {3};
  const Counts seen = {{2, 5}};
  const SampleRow row{.temperature = 0.1f,
                      .presence = 2,
                      .frequency = 1,
                      .repetition = 3,
                      .top_k = 1,
                      .u = 0.5,
                      .banned = banned,
                      .bias = bias,
                      .seen = seen,
                      .top_logprobs = 3};
  const SampleOut got = draw(z, row, 4);
  const double sum = std::exp(1.0) + std::exp(2.0) + std::exp(3.0) + std::exp(4.0);
  CHECK(got.token == 0);
  CHECK(static_cast<double>(got.logprob) == doctest::Approx(1 - std::log(sum)));
  REQUIRE(got.top.size() == 3);
  CHECK(got.top[0].first == 3);
  CHECK(got.top[2].first == 1);
  CHECK(static_cast<double>(got.top[0].second) == doctest::Approx(4 - std::log(sum)));
  const std::vector<uint32_t> bits = {0b00101};
  const SampleOut masked = draw(z, {.temperature = 0, .allowed = bits, .top_logprobs = 9}, 4);
  REQUIRE(masked.top.size() == 2);
  CHECK(static_cast<double>(masked.logprob) == doctest::Approx(3 - std::log(std::exp(1.0) + std::exp(3.0))));
  CHECK(draw(z, {.temperature = 0, .top_logprobs = 0}, 4).top.empty());
  CHECK(draw(z, {.temperature = 0}, 4).top.empty());
  const SampleOut ties = draw({7, 7, 7}, {.temperature = 0, .top_logprobs = 2});
  CHECK(ties.top[0].first == 0);
  CHECK(ties.top[1].first == 1);
}

TEST_CASE("penalties: repetition by sign, frequency by count, presence once, prompt tokens only repetition") {
  SampleRow row{.temperature = 0, .repetition = 2};
  const Counts both = {{0, 0}, {1, 0}};
  row.seen = both;
  CHECK(draw({3, -1, 1.6f}, row).token == 2);  // 1.5, −2, 1.6
  CHECK(draw({3, -1, 1.4f}, row).token == 0);
  CHECK(draw({-3, -1, -2.5f}, row).token == 1);  // −6, −2, −2.5
  const Counts counts = {{0, 3}, {1, 0}};
  row = {.temperature = 0, .frequency = 0.5f, .seen = counts};
  CHECK(draw({3, 1.4f, 0}, row).token == 0);  // 1.5
  CHECK(draw({3, 1.6f, 0}, row).token == 1);
  row = {.temperature = 0, .presence = 1, .seen = counts};
  CHECK(draw({3, 2.1f, 0}, row).token == 1);  // 2 against 2.1
  CHECK(draw({3, 1.9f, 0}, row).token == 0);
}

TEST_CASE("temperature and the inverse CDF: frequencies over u are the probabilities") {
  const Floats z = {0.5f, 2.0f, -1.0f, 1.0f};
  for (const float temperature : {0.5f, 1.0f, 3.0f}) {
    const auto count = reached(z, {.temperature = temperature});
    double sum = 0;
    for (const float v : z) sum += std::exp(static_cast<double>(v / temperature));
    for (const auto& [id, n] : count) {
      CHECK(std::fabs(n - 4000 * std::exp(static_cast<double>(z[at(id)] / temperature)) / sum) <= 1.0);
    }
    CHECK(draw(z, {.temperature = temperature, .u = 0}).token == 1);            // best first
    CHECK(draw(z, {.temperature = temperature, .u = 1 - 0x1p-53}).token == 2);  // worst last
  }
}

TEST_CASE("filters: exactly the right tokens stay reachable") {
  const Floats z = {std::log(0.1f), std::log(0.4f), std::log(0.1f), std::log(0.3f), std::log(0.1f)};
  CHECK(ids(reached(z, {})) == std::set<int32_t>{0, 1, 2, 3, 4});
  CHECK(ids(reached(z, {.top_k = 1})) == std::set<int32_t>{1});
  CHECK(ids(reached(z, {.top_k = 2})) == std::set<int32_t>{1, 3});
  CHECK(ids(reached(z, {.top_k = 3})) == std::set<int32_t>{0, 1, 2, 3, 4});  // ties of the third stay
  CHECK(ids(reached(z, {.min_p = 0.5f})) == std::set<int32_t>{1, 3});
  CHECK(ids(reached(z, {.min_p = 0.2f})) == std::set<int32_t>{0, 1, 2, 3, 4});
  CHECK(ids(reached(z, {.min_p = 1.0f})) == std::set<int32_t>{1});
  CHECK(ids(reached(z, {.top_p = 0.39f})) == std::set<int32_t>{1});
  CHECK(ids(reached(z, {.top_p = 0.41f})) == std::set<int32_t>{1, 3});     // the token that crosses stays
  CHECK(ids(reached(z, {.top_p = 0.75f})) == std::set<int32_t>{0, 1, 3});  // among ties the lower id
  CHECK(ids(reached(z, {.top_p = 0.0f})) == std::set<int32_t>{1});
  CHECK(ids(reached(z, {.top_p = -1.0f})) == std::set<int32_t>{1});
  // top_p works on what top_k and min_p leave, renormalised: 0.4 / 0.7 > 0.5.
  CHECK(ids(reached(z, {.top_p = 0.5f, .top_k = 2})) == std::set<int32_t>{1});
  CHECK(ids(reached(z, {.top_p = 0.5f, .min_p = 0.5f})) == std::set<int32_t>{1});
  CHECK(ids(reached(z, {.top_p = 0.5f})) == std::set<int32_t>{1, 3});
  const auto halves = reached(z, {.top_k = 2});
  CHECK(std::abs(halves.at(1) - 4000 * 4 / 7) <= 1);
  // min_p looks at probabilities after the temperature: 0.75 to the power 1/4 is 0.93.
  CHECK(ids(reached(z, {.temperature = 4, .min_p = 0.9f})) == std::set<int32_t>{1, 3});
}

TEST_CASE("the whole vocabulary, flat and peaked, far into the tail") {
  Random random(2);
  const int n = 154880, text = 154856;
  for (const float spread : {0.0f, 0.01f, 5.0f}) {
    const Floats z = random.normals(n, spread);
    for (const double u : {0.0, 0.3, 0.9, 0.999}) {
      for (const float top_p : {1.0f, 0.95f}) {
        const SampleRow row{.top_p = top_p, .u = u};
        const SampleOut got = draw(z, row, text);
        const Oracle want = oracle(z, row, text);
        CHECK(got.token < text);
        CHECK(static_cast<double>(got.logprob) == doctest::Approx(want.logprob).epsilon(1e-3));
        if (spread == 0.0f) CHECK(std::abs(got.token - static_cast<int>(u * static_cast<double>(top_p) * text)) <= 1);
      }
    }
  }
}

TEST_CASE("rows do not see each other and threads change nothing") {
  Random random(3);
  const int64_t rows = 7, n = 500;
  const Floats z = random.normals(rows * n, 2.0f);
  std::vector<SampleRow> all(at(rows));
  for (size_t r = 0; r < all.size(); ++r)
    all[r] = {.top_p = 0.9f, .top_k = 40, .u = 0.13 * static_cast<double>(r), .top_logprobs = 4};
  Floats work = z;
  std::vector<SampleOut> out(at(rows));
  make_cpu_ops(3)->sample({.logits = tensor(work, {rows, n}), .text_vocab = 480, .rows = all, .out = out});
  for (int64_t r = 0; r < rows; ++r) {
    const SampleOut single = draw({z.begin() + r * n, z.begin() + (r + 1) * n}, all[at(r)], 480);
    CHECK(single.token == out[at(r)].token);
    CHECK(single.logprob == out[at(r)].logprob);
    CHECK(single.top == out[at(r)].top);
  }
}

TEST_CASE("hostile values: always a legal token or −1") {
  const float nan = NAN, inf = INFINITY, big = std::numeric_limits<float>::max();
  const Ints banned = {-5, 99, 2147483647};
  const Pairs bias = {{-1, 1.0f}, {99, inf}, {0, nan}, {1, inf}, {2, -inf}};
  const Counts seen = {{-3, 1}, {99, 2}, {1, -4}, {0, 2147483647}};
  const std::vector<Floats> logits = {{nan, 1, 2},     {inf, inf, 0}, {big, -big, big},
                                      {-inf, -inf, 3}, {nan, nan, 0}, {0, 0, 0}};
  const float values[] = {nan, inf, -inf, 0.0f, -1.0f, 1e-45f, 1e30f, 0.5f};
  for (const Floats& z : logits) {
    for (const float a : values) {
      for (const float b : values) {
        for (const double u : {0.0, 0.5, 1.0, 7.0, -1.0, static_cast<double>(nan)}) {
          const SampleRow rows[] = {{.temperature = a, .top_p = b, .u = u, .top_logprobs = 2147483647},
                                    {.min_p = a, .repetition = b, .top_k = -2147483647, .u = u, .seen = seen},
                                    {.temperature = b,
                                     .presence = a,
                                     .frequency = a,
                                     .top_k = 2147483647,
                                     .u = u,
                                     .banned = banned,
                                     .bias = bias,
                                     .seen = seen}};
          for (const SampleRow& row : rows) {
            const SampleOut got = draw(z, row);
            REQUIRE(got.token >= -1);
            REQUIRE(got.token < 3);
            if (got.token >= 0) REQUIRE_FALSE(std::isnan(z[at(got.token)]));
            REQUIRE_FALSE(std::isnan(got.logprob));
          }
        }
      }
    }
  }
}

TEST_CASE("nothing left to choose is token −1, never a forbidden one") {
  const std::vector<uint32_t> none = {0};
  const Ints banned = {0, 1};
  CHECK(draw({1, 2}, {.allowed = none}).token == -1);
  CHECK(draw({1, 2}, {.temperature = 0, .banned = banned}).token == -1);
  CHECK(draw({1, 2}, {}, 0).token == -1);
  CHECK(draw({NAN, NAN}, {}).token == -1);
  CHECK(draw({}, {}).token == -1);
  CHECK(draw({1, 2}, {.allowed = none, .top_logprobs = 3}).top.empty());
  CHECK(draw({-INFINITY, -100}, {.u = 0.9}).token == 1);
}

}  // namespace
}  // namespace glm53::test
