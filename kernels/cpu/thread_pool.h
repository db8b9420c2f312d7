// A fixed set of threads that divide outputs among themselves, always in the same way.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace glm53::cpu {

/// Non-owning reference to a callable; lives as long as the callable it was made from.
template <class Signature>
class FunctionRef;

template <class R, class... A>
class FunctionRef<R(A...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<R, F&, A...>)
  FunctionRef(F&& f)  // NOLINT: implicit on purpose, callers pass lambdas
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, A... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<A>(args)...);
        }) {}
  R operator()(A... args) const { return call_(object_, std::forward<A>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, A...);
};

/// Static partition: [0, n) is cut at multiples of `grain` into one contiguous range a worker. The partition never
/// changes what a body computes for an index, so results do not depend on the number of threads. Bodies must not call
/// the pool again.
class ThreadPool {
 public:
  /// `threads` ≥ 1 counts the calling thread; 1 runs everything inline. Throws Error(config) for less.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// body(begin, end) over disjoint ranges that cover [0, n); returns when all are done. The first worker's exception
  /// is thrown again here.
  void parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body);
  /// The same with the worker's number (0 … threads−1) in front, for scratch that belongs to a worker.
  void parallel_for_worker(int64_t n, int64_t grain, FunctionRef<void(int worker, int64_t begin, int64_t end)> body);

 private:
  struct Job {
    int64_t n = 0, grain = 1;
    const FunctionRef<void(int, int64_t, int64_t)>* body = nullptr;
  };
  void work(int worker);
  void run_part(int worker) noexcept;

  int threads_;
  Job job_;
  std::vector<std::exception_ptr> failures_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> pending_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> workers_;
};

}  // namespace glm53::cpu
