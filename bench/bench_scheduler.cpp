// What a step costs rank 0 besides the model: planning, encoding the plan, taking the results, with many requests at
// work.
//   bench_scheduler [running] [steps] [model]     prints a table and one JSON line
// The model is models/glm53-tiny on the CPU backend, alone; the requests are conversations with a prefix cache, each
// followed by the next, so that prompts, admissions and ends are in the mix.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <vector>

#include "common/error.h"
#include "common/strings.h"
#include "engine/comm/communicator.h"
#include "engine/model/model.h"
#include "engine/runtime/model_executor.h"
#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPrompt = 300, kAnswer = 100, kContext = 1024, kSnaps = 64;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double at(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())))];
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double v : values) total += v;
  return total;
}

wire::Submit request(uint64_t id) {
  wire::Submit r;
  r.id = id;
  for (int i = 0; i < kPrompt; ++i)
    r.prompt.push_back(i < kPrompt / 2 ? 100 + i
                                       : 100 + static_cast<int32_t>((id * 37 + static_cast<uint64_t>(i)) % 2000));
  r.boundaries = {kPrompt / 2, kPrompt - 3};
  r.sampling.temperature = 0;
  r.sampling.max_tokens = kAnswer / 2 + static_cast<int32_t>(id * 13 % kAnswer);  // they do not end together
  r.sampling.ignore_eos = true;
  r.key = cat("key", id % 8);
  return r;
}

struct Times {
  std::vector<double> step, plan, encode, complete;
};

void print(const Times& t, int running, uint64_t finished) {
  const double all = sum(t.step), own = sum(t.plan) + sum(t.encode) + sum(t.complete);
  std::printf("%d running, %zu steps, %llu requests ended\n", running, t.step.size(),
              static_cast<unsigned long long>(finished));
  std::printf("%-22s %10s %10s %10s\n", "ms a step", "mean", "p50", "p99");
  const auto row = [](const char* name, const std::vector<double>& v) {
    std::printf("%-22s %10.4f %10.4f %10.4f\n", name, sum(v) / static_cast<double>(v.size()), at(v, 0.5), at(v, 0.99));
  };
  row("model and sampling", t.step);
  row("plan", t.plan);
  row("encode the plan", t.encode);
  row("results and deltas", t.complete);
  std::printf("bookkeeping: %.2f %% of a step\n", 100 * own / (all + own));
  std::printf(
      "{\"running\":%d,\"steps\":%zu,\"finished\":%llu,\"step_ms\":%.4f,\"plan_ms\":%.4f,\"encode_ms\":%.4f,"
      "\"complete_ms\":%.4f,\"bookkeeping_share\":%.5f}\n",
      running, t.step.size(), static_cast<unsigned long long>(finished), all / static_cast<double>(t.step.size()),
      sum(t.plan) / static_cast<double>(t.step.size()), sum(t.encode) / static_cast<double>(t.step.size()),
      sum(t.complete) / static_cast<double>(t.step.size()), own / (all + own));
}

void run(int running, size_t steps, const std::string& dir) {
  ModelLimits limits;
  limits.max_seqs = running;
  limits.max_rows = running + 256;
  limits.max_context = kContext;
  limits.max_logit_rows = running;
  const auto ops = make_cpu_ops(2);
  const auto comm = make_single_communicator();
  const auto model = load_model(dir, FormatPolicy::as_stored(), limits, *ops, *comm);
  const int blocks = running * kContext / kBlockTokens + 1;
  const OwnedCaches caches =
      make_caches(model->geometry(), {.blocks = blocks, .slots = running, .snaps = kSnaps}, *ops);
  const auto vocab = static_cast<int32_t>(model->config().vocab);
  SamplingTable table({vocab, vocab, model->config().eos});
  SchedulerLimits s;
  s.max_context = kContext;
  s.max_seqs = running;
  s.max_rows = limits.max_rows;
  s.prefill_chunk = 256;
  s.max_window = model->limits().max_window;
  s.blocks = blocks;
  s.snaps = kSnaps;
  Scheduler scheduler(s, table, 1);
  scheduler.set_gate(true);
  ModelExecutor executor(*model, caches.caches, *ops, &table);

  uint64_t last = 0, finished = 0;
  for (int i = 0; i < running; ++i) scheduler.submit(request(++last));
  Times times;
  const auto start = Clock::now();
  for (bool warm = false; times.step.size() < steps;) {
    const auto begin = Clock::now();
    const auto plan = scheduler.plan(Scheduler::Time(static_cast<int64_t>(ms_since(start))));
    const double plan_ms = ms_since(begin);
    if (!plan) throw Error(Code::internal, "nothing to run");
    const auto encoding = Clock::now();
    const auto frame = encode(*plan);
    const double encode_ms = ms_since(encoding);
    const auto step = Clock::now();
    executor.submit(*plan);
    const StepResult result = executor.poll().value();
    const double step_ms = ms_since(step);
    const auto completing = Clock::now();
    scheduler.complete(result);
    uint64_t ended = 0;
    for (const wire::Delta& d : scheduler.take_deltas()) ended += d.finish.empty() ? 0 : 1;
    for (uint64_t i = 0; i < ended; ++i) scheduler.submit(request(++last));
    const double complete_ms = ms_since(completing);
    finished += ended;
    warm = warm || finished >= static_cast<uint64_t>(running);  // all states are mixed by then
    if (!warm) continue;
    times.step.push_back(step_ms);
    times.plan.push_back(plan_ms);
    times.encode.push_back(encode_ms);
    times.complete.push_back(complete_ms);
  }
  print(times, running, finished);
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    const auto number = [&](size_t i, int64_t fallback) {
      return arguments.size() > i ? glm53::parse_int(arguments[i]).value_or(0) : fallback;
    };
    const int64_t running = number(0, 64), steps = number(1, 300);
    if (running < 1 || running > 512 || steps < 1 || arguments.size() > 3)
      throw glm53::Error(glm53::Code::usage, "bench_scheduler [running, 1 to 512] [steps] [folder of the model]");
    glm53::run(static_cast<int>(running), static_cast<size_t>(steps),
               arguments.size() > 2 ? arguments[2] : "models/glm53-tiny");
  } catch (const std::exception& e) {
    std::cerr << "bench_scheduler: " << e.what() << '\n';
    return 1;
  }
  return 0;
}
