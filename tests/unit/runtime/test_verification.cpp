// What is sampled with drafts follows the law of what is sampled without: fixed logits of glm53-tiny, many seeds.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "engine/loader/safetensors.h"
#include "engine/runtime/verification.h"

using namespace glm53;

namespace {

using Tokens = std::vector<int32_t>;
using Law = std::vector<double>;

constexpr int32_t kVocab = 48;
constexpr int kRows = 4, kDraws = 100000, kAtOnce = 500;
const TokenSpace kSpace{.vocab = kVocab, .text_vocab = kVocab, .eos = {kVocab - 1}};

/// Rows of the model's logits, cut down to the tokens that the first of them ranks best; the best is token 0.
std::vector<std::vector<float>> fixed_logits() {
  const SafetensorsFile file(GLM53_SOURCE_DIR "/tests/golden/data/glm53-tiny/golden.safetensors");
  const Tensor all = file.view("story.fp32.logits");
  const auto vocab = static_cast<size_t>(all.dim(1));
  std::vector<std::vector<float>> rows(kRows, std::vector<float>(vocab));
  for (size_t i = 0; i < kRows; ++i)
    std::copy_n(static_cast<const float*>(all.data) + i * vocab, vocab, rows[i].begin());
  std::vector<size_t> order(vocab);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rows[0][a] > rows[0][b]; });
  std::vector<std::vector<float>> cut(kRows);
  for (size_t i = 0; i < kRows; ++i)
    // A third of the model's certainty, so that more than one token has a chance.
    for (size_t j = 0; j < kVocab; ++j) cut[i].push_back(rows[i][order[j]] / 3);
  return cut;
}

/// frontend §6 in fp64, for the parameters used here.
Law law_of(const std::vector<float>& logits, const wire::SamplingParams& p, const std::map<int32_t, int>& seen,
           const std::function<bool(int32_t)>& open) {
  std::vector<double> z(logits.begin(), logits.end());
  for (int32_t i = 0; i < kVocab; ++i) {
    double& v = z[static_cast<size_t>(i)];
    if (!open(i)) v = -std::numeric_limits<double>::infinity();
    if (const auto at = seen.find(i); at != seen.end()) {
      v = v > 0 ? v / static_cast<double>(p.repetition) : v * static_cast<double>(p.repetition);
      if (at->second > 0) v -= static_cast<double>(p.frequency) * at->second + static_cast<double>(p.presence);
    }
    v /= static_cast<double>(p.temperature);
  }
  const double top = *std::max_element(z.begin(), z.end());
  Law law(kVocab);
  for (size_t i = 0; i < kVocab; ++i) law[i] = std::exp(z[i] - top);
  const double all = std::accumulate(law.begin(), law.end(), 0.0);
  std::vector<size_t> order(kVocab);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return law[a] > law[b]; });
  double sum = 0;
  for (const size_t i : order) {
    const double own = law[i] / all;
    law[i] = sum < static_cast<double>(p.top_p) ? own : 0;
    sum += own;
  }
  const double kept = std::accumulate(law.begin(), law.end(), 0.0);
  for (double& v : law) v /= kept;
  return law;
}

/// Whether so many draws of each token can come from the law: chi-square by degrees of freedom, those with small
/// expectations together. The bound is five deviations, so that a good sampler fails once in millions.
void check_law(const std::vector<int>& count, const Law& law) {
  const int total = std::accumulate(count.begin(), count.end(), 0);
  double chi = 0, rest_expected = 0;
  int cells = 0, rest = 0;
  for (size_t i = 0; i < law.size(); ++i) {
    const double expected = law[i] * total;
    if (expected == 0) CHECK(count[i] == 0);
    if (expected < 20) {
      rest_expected += expected;
      rest += count[i];
      continue;
    }
    ++cells;
    chi += (count[i] - expected) * (count[i] - expected) / expected;
  }
  if (rest_expected >= 20) {
    ++cells;
    chi += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
  }
  const double freedom = std::max(cells - 1, 1);
  CAPTURE(total);
  CAPTURE(chi);
  CAPTURE(freedom);
  CHECK(chi < freedom + 5 * std::sqrt(2 * freedom) + 5);
}

struct Case {
  std::string name;
  wire::SamplingParams params;
  std::string rules;
  std::function<bool(const Tokens& before, int32_t token)> open = [](const Tokens&, int32_t) { return true; };
};

std::vector<Case> cases() {
  const auto at = [](float temperature) {
    wire::SamplingParams p;
    p.temperature = temperature;
    return p;
  };
  std::vector<Case> all;
  for (const float t : {0.5F, 1.0F, 1.7F}) all.push_back({cat("temperature ", t), at(t), ""});
  all.push_back({"top-p", at(1.2F), ""});
  all.back().params.top_p = 0.7F;
  all.push_back({"penalties", at(1.0F), ""});
  all.back().params.repetition = 1.3F;
  all.back().params.presence = 0.4F;
  all.back().params.frequency = 0.3F;
  all.push_back({"end tokens held back", at(1.0F), ""});
  all.back().params.min_tokens = 2;
  all.back().open = [](const Tokens& before, int32_t token) { return before.size() >= 2 || token != kVocab - 1; };
  // Behind 0, token 1 must not come: it is a draft, so the drafts are cut there.
  all.push_back({"drafts cut by a rule", at(1.0F), "bad 0 1\nbad 5\n"});
  all.back().open = [](const Tokens& before, int32_t token) {
    return token != 5 && !(token == 1 && !before.empty() && before.back() == 0);
  };
  return all;
}

}  // namespace

TEST_CASE("sample and match: the tokens follow the target's law row by row, whatever the drafts") {
  const auto logits = fixed_logits();
  const auto ops = make_cpu_ops(2);
  const Tokens prompt = {3, 4, 4};
  for (const Tokens& drafts : {Tokens{0, 1, 2}, Tokens{0, 0, 7}}) {
    for (const Case& c : cases()) {
      if (drafts[1] == 0 && c.name != "penalties") continue;  // a draft again counts twice
      CAPTURE(c.name);
      CAPTURE(drafts[1]);
      // Tokens that were drawn from each row, given that all drafts before it were accepted.
      std::vector<std::vector<int>> count(kRows, std::vector<int>(kVocab));
      size_t accepted = 0;
      for (int draw = 0; draw < kDraws; draw += kAtOnce) {
        std::vector<std::unique_ptr<SamplingState>> states;
        std::vector<SampleRow> rows;
        std::vector<size_t> first;
        std::vector<float> z;
        for (int i = 0; i < kAtOnce; ++i) {
          wire::Submit r;
          r.prompt = prompt;
          r.seed = static_cast<uint64_t>(draw + i) * 7919 + 1;
          r.sampling = c.params;
          r.grammar = c.rules;
          states.push_back(std::make_unique<SamplingState>(r, kSpace));
          const std::span<const SampleRow> own = states.back()->rows(drafts);
          first.push_back(rows.size());
          rows.insert(rows.end(), own.begin(), own.end());
          for (size_t row = 0; row < own.size(); ++row) z.insert(z.end(), logits[row].begin(), logits[row].end());
        }
        std::vector<SampleOut> out(rows.size());
        ops->sample({Tensor::of(z.data(), Dtype::f32, {static_cast<int64_t>(rows.size()), kVocab}), kVocab, rows, out});
        first.push_back(rows.size());
        for (size_t i = 0; i < kAtOnce; ++i) {
          const SeqResult result =
              sample_and_match(drafts, std::span(out).subspan(first[i], first[i + 1] - first[i]), states[i].get());
          accepted += static_cast<size_t>(result.accepted);
          for (size_t t = 0; t < result.tokens.size(); ++t) ++count[t][static_cast<size_t>(result.tokens[t].token)];
        }
      }
      CHECK(accepted > kDraws / 20);
      Tokens before;
      for (size_t i = 0; i < kRows; ++i) {
        const int reached = std::accumulate(count[i].begin(), count[i].end(), 0);
        if (reached < 1000) break;
        CAPTURE(i);
        std::map<int32_t, int> seen;
        for (const int32_t t : prompt) seen[t] += 0;
        for (const int32_t t : before) ++seen[t];
        check_law(count[i], law_of(logits[i], c.params, seen, [&](int32_t t) { return c.open(before, t); }));
        if (i < drafts.size()) before.push_back(drafts[i]);
      }
    }
  }
}
