// Sampling: one row's settings at the real vocabulary, on the device and, for comparison, on one core of the host.
#include "bench/step_ops.h"

namespace glm53 {
namespace {

constexpr int64_t kVocab = 154880;

struct Mode {
  const char* name;
  SampleRow row;
};

/// Median microseconds of a call that waits for its result.
double wall(int reps, const std::function<void()>& call) {
  std::vector<double> us;
  for (int i = 0; i < reps; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(us.begin(), us.begin() + static_cast<std::ptrdiff_t>(us.size() / 2), us.end());
  return us[us.size() / 2];
}

/// Values as peaked as a model's.
std::vector<float> logits_of(int64_t rows) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> v(static_cast<size_t>(rows * kVocab));
  for (float& x : v) x = normal(random);
  return v;
}

}  // namespace

void bench_sampling(Bench& bench) {
  if (!bench.wanted("sample")) return;
  const Mode modes[] = {{"greedy", {.temperature = 0}},
                        {"T 1", {.u = 0.7}},
                        {"T 1, top_p 0.95", {.top_p = 0.95F, .u = 0.7}},
                        {"and top_k, best 20", {.top_p = 0.95F, .top_k = 40, .u = 0.7, .top_logprobs = 20}}};
  const auto host = make_cpu_ops(1);
  for (const int64_t rows : {1, 8, 64}) {
    const std::vector<float> logits = logits_of(rows);
    const Buffer here = bench.upload(logits);
    const Tensor there = here.view(Dtype::f32, {rows, kVocab});
    for (const Mode& mode : modes) {
      const std::vector<SampleRow> settings(static_cast<size_t>(rows), mode.row);
      std::vector<SampleOut> out(settings.size());
      const auto draw = [&](Ops& ops, Tensor from) { ops.sample({from, kVocab - 100, settings, out}); };
      for (int i = 0; i < 3; ++i) draw(bench.ops(), there);
      bench.add({"sample", mode.name, rows, wall(51, [&] { draw(bench.ops(), there); }), 0, 0, 0});
      if (rows != 1) continue;
      std::vector<float> copy = logits;
      const Tensor mine = Tensor::of(copy.data(), Dtype::f32, {rows, kVocab});
      bench.add({"sample, host", mode.name, rows, wall(11, [&] { draw(*host, mine); }), 0, 0, 0});
    }
  }
}

}  // namespace glm53
