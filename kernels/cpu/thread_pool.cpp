#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <string>

#include "common/error.h"

namespace glm53::cpu {

namespace {

/// Waits until `value` is no longer `old`: a short spin for back-to-back operators, then asleep.
uint32_t wait_change(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < 2000; ++i) {
    const uint32_t now = value.load(std::memory_order_acquire);
    if (now != old) return now;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  if (threads < 1) throw Error(Code::config, "thread pool of " + std::to_string(threads) + " threads", "at least 1");
  failures_.resize(static_cast<size_t>(threads));
  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { work(w); });
  } catch (...) {
    stop_ = true;
    ++generation_;
    generation_.notify_all();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  ++generation_;
  generation_.notify_all();
}

void ThreadPool::work(int worker) {
  uint32_t seen = 0;
  while (true) {
    seen = wait_change(generation_, seen);
    if (stop_) return;
    run_part(worker);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
  }
}

void ThreadPool::run_part(int worker) noexcept {
  const int64_t units = (job_.n + job_.grain - 1) / job_.grain;
  const int64_t begin = units * worker / threads_ * job_.grain;
  const int64_t end = std::min(units * (worker + 1) / threads_ * job_.grain, job_.n);
  if (begin >= end) return;
  try {
    (*job_.body)(worker, begin, end);
  } catch (...) {
    failures_[static_cast<size_t>(worker)] = std::current_exception();
  }
}

void ThreadPool::parallel_for_worker(int64_t n, int64_t grain, FunctionRef<void(int, int64_t, int64_t)> body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (threads_ == 1 || n <= grain) return body(0, 0, n);
  job_ = {n, grain, &body};
  pending_.store(static_cast<uint32_t>(threads_ - 1), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  run_part(0);
  for (uint32_t left = pending_.load(std::memory_order_acquire); left != 0;) left = wait_change(pending_, left);
  std::exception_ptr first;
  for (std::exception_ptr& failure : failures_) {
    if (failure && !first) first = failure;
    failure = nullptr;
  }
  if (first) std::rethrow_exception(first);
}

void ThreadPool::parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  parallel_for_worker(n, grain, [&body](int, int64_t begin, int64_t end) { body(begin, end); });
}

}  // namespace glm53::cpu
