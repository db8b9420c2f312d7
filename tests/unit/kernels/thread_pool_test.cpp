// The thread pool: every index once, the same partition always, failures on the caller's thread.
#include "kernels/cpu/thread_pool.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include "common/error.h"

namespace glm53::cpu {
namespace {

TEST_CASE("every index is visited once, in ranges cut at the grain") {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 64, 1000}) {
      for (const int64_t grain : {0, 1, 3, 8, 2000}) {
        std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
        std::atomic<int> ragged{0}, wrong_worker{0};
        pool.parallel_for_worker(n, grain, [&](int worker, int64_t begin, int64_t end) {
          if (worker < 0 || worker >= threads) ++wrong_worker;
          if (grain > 0 && begin % grain != 0) ++ragged;
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        int wrong = 0;
        for (const auto& v : visits) wrong += v != 1;
        CHECK(wrong == 0);
        CHECK(ragged == 0);
        CHECK(wrong_worker == 0);
      }
    }
  }
}

TEST_CASE("the partition is static") {
  ThreadPool pool(3);
  std::vector<int> first(100), second(100);
  for (auto* owner : {&first, &second}) {
    pool.parallel_for_worker(100, 1, [&](int worker, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) (*owner)[static_cast<size_t>(i)] = worker;
    });
  }
  CHECK(first == second);
  CHECK(first.front() == 0);
  CHECK(first.back() == 2);
}

TEST_CASE("many short jobs follow each other") {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 5000; ++i) pool.parallel_for(8, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  CHECK(sum == 40000);
}

TEST_CASE("an exception of a worker reaches the caller, and the pool goes on") {
  ThreadPool pool(3);
  for (int64_t bad = 0; bad < 9; ++bad) {
    CHECK_THROWS_WITH(pool.parallel_for(9, 1,
                                        [&](int64_t begin, int64_t end) {
                                          if (begin <= bad && bad < end) throw std::runtime_error("row");
                                        }),
                      "row");
  }
  std::atomic<int> n{0};
  pool.parallel_for(9, 1, [&](int64_t begin, int64_t end) { n += static_cast<int>(end - begin); });
  CHECK(n == 9);
  CHECK_THROWS_AS(ThreadPool(0), Error);
}

}  // namespace
}  // namespace glm53::cpu
