// Router (model §6), fp32 throughout.
#include <algorithm>
#include <limits>

#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/pointwise.h"

namespace glm53::cpu {

namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

/// Index of the best value not yet taken; ties and NaN go to the lower index.
int64_t best_free(const float* value, const uint8_t* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (taken[i] == 0 && (best < 0 || value[i] > value[best])) best = i;
  }
  return best;
}

/// Sum of the two largest values (of the only one where there is one).
float group_score(const float* b, int64_t n) {
  float first = kMasked, second = kMasked;
  for (int64_t i = 0; i < n; ++i) {
    if (b[i] > first) {
      second = first;
      first = b[i];
    } else if (b[i] > second) {
      second = b[i];
    }
  }
  return n == 1 ? first : first + second;
}

struct RowRouter {
  const RouterArgs& args;
  int64_t experts;

  /// Masks all experts outside the best groups with −∞ (not 0: a biased score may be negative).
  void mask_groups(float* b, float* score, uint8_t* taken) const {
    const int64_t size = experts / args.groups;
    for (int g = 0; g < args.groups; ++g) score[g] = group_score(b + g * size, size);
    std::fill_n(taken, args.groups, uint8_t{0});
    for (int i = 0; i < args.top_groups; ++i) taken[best_free(score, taken, args.groups)] = 1;
    for (int g = 0; g < args.groups; ++g) {
      if (taken[g] == 0) std::fill_n(b + g * size, size, kMasked);
    }
  }

  /// s, b: [experts] scratch; taken: [experts].
  void row(const float* logits, float* s, float* b, uint8_t* taken, int32_t* index, float* weight) const {
    for (int64_t e = 0; e < experts; ++e) {
      s[e] = sigmoid(logits[e]);
      b[e] = s[e] + value_at(*args.bias, e);
    }
    if (args.groups > 1) {
      float* score = b + experts;
      mask_groups(b, score, taken);
    }
    std::fill_n(taken, experts, uint8_t{0});
    for (int i = 0; i < args.k; ++i) taken[best_free(b, taken, experts)] = 1;
    int chosen = 0;
    float total = 0;
    for (int64_t e = 0; e < experts; ++e) {
      if (taken[e] == 0) continue;
      index[chosen] = static_cast<int32_t>(e);
      weight[chosen++] = s[e];
      total += s[e];
    }
    for (int i = 0; i < args.k; ++i) {
      if (args.normalize) weight[i] /= total + 1e-20f;
      weight[i] *= args.scale;
    }
  }
};

}  // namespace

void CpuOps::router(const RouterArgs& args) {
  expect("router", "x", args.x, Dtype::f32, {-1, -1});
  const int64_t rows = args.x.dim(0), experts = args.w->out;
  expect_plain("router", "w", *args.w, experts, args.x.dim(1));
  expect_plain("router", "bias", *args.bias, experts, 1);
  expect_that(args.k >= 1 && args.k <= experts, "router", "k must be 1 … experts");
  expect_that(
      args.groups <= 1 || (experts % args.groups == 0 && args.top_groups >= 1 && args.top_groups <= args.groups),
      "router", "groups must divide the experts, top_groups must be 1 … groups");
  expect_that(args.real_rows >= 0 && args.real_rows <= rows, "router", "real_rows must be 0 … rows");
  expect("router", "index", args.index, Dtype::i32, {rows, args.k});
  expect("router", "weight", args.weight, Dtype::f32, {rows, args.k});
  Tensor logits = args.logits;
  if (logits.empty()) {
    float* memory = scratch(Area::logits).get<float>(static_cast<size_t>(rows * experts));
    logits = Tensor::of(memory, Dtype::f32, {rows, experts});
  }
  expect("router", "logits", logits, Dtype::f32, {rows, experts});
  if (rows == 0) return;
  dense(*args.w, args.x.as<const float>(), args.x.stride[0], rows, logits.as<float>(), logits.stride[0], 0);
  const RowRouter one{args, experts};
  pool().parallel_for_worker(rows, 1, [&](int worker, int64_t begin, int64_t end) {
    float* s = worker_scratch(worker).get<float>(static_cast<size_t>(4 * experts));
    float* b = s + experts;  // [experts], then scores of groups [≤ experts]
    auto* taken = reinterpret_cast<uint8_t*>(b + 2 * experts);
    for (int64_t r = begin; r < end; ++r) {
      int32_t* index = args.index.as<int32_t>() + r * args.index.stride[0];
      float* weight = args.weight.as<float>() + r * args.weight.stride[0];
      if (r < args.real_rows) {
        one.row(logits.as<const float>() + r * logits.stride[0], s, b, taken, index, weight);
      } else {
        std::fill_n(index, args.k, -1);
        std::fill_n(weight, args.k, 0.0f);
      }
    }
  });
}

}  // namespace glm53::cpu
