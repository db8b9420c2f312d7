#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <signal.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/wait.h>

#include "common/error.h"
#include "group.h"
#include "kernels/ops.h"

using namespace glm53;
using namespace glm53::test;

namespace {

// As the programs do: Gloo writes to lost peers without MSG_NOSIGNAL.
[[maybe_unused]] const auto sigpipe_before = ::signal(SIGPIPE, SIG_IGN);

/// Values whose sum depends on its order.
std::vector<float> values_of(int rank, size_t n) {
  std::mt19937 random(static_cast<unsigned>(rank * 7919 + 1));
  std::uniform_real_distribution<float> exponent(-12, 12);
  std::vector<float> v(n);
  for (float& x : v) x = std::ldexp(exponent(random), static_cast<int>(exponent(random)));
  return v;
}

std::vector<float> ordered_sum(int size, size_t n) {
  std::vector<float> sum = values_of(0, n);
  for (int r = 1; r < size; ++r) {
    const auto v = values_of(r, n);
    for (size_t i = 0; i < n; ++i) sum[i] += v[i];
  }
  return sum;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Tensor vector_of(std::vector<float>& v) {
  return Tensor::of(v.data(), Dtype::f32, {static_cast<int64_t>(v.size())});
}
Tensor matrix_of(std::vector<float>& v, int64_t rows) {
  return Tensor::of(v.data(), Dtype::f32, {rows, static_cast<int64_t>(v.size()) / rows});
}

Code code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.code();
  }
  return Code::ok;
}

}  // namespace

TEST_CASE("one rank needs no transport") {
  const auto comm = make_single_communicator();
  std::vector<float> v = values_of(0, 6), out(6);
  comm->all_reduce(vector_of(v));
  CHECK(same_bits(v, values_of(0, 6)));
  comm->gather(matrix_of(v, 2), matrix_of(out, 2));
  CHECK(same_bits(v, out));
}

TEST_CASE("all_reduce sums in rank order with the same bits everywhere") {
  for (const int size : {2, 3, 4}) {
    CAPTURE(size);
    std::atomic<int> wrong = 0;
    run_group(size, [&](Member& m, int rank) {
      for (const size_t n : {1, 2, 3, 7, 255, 1025, 4096, 8191, 16384, 16385, 32771, 100003, 262144, 300007}) {
        auto v = values_of(rank, n);
        m.comm->all_reduce(vector_of(v));
        if (!same_bits(v, ordered_sum(size, n))) ++wrong;
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("through host memory: the same sums and rows, of the backend's tensors") {
  for (const int size : {2, 3}) {
    CAPTURE(size);
    std::atomic<int> wrong = 0;
    run_group(size, [&](Member& m, int rank) {
      const auto ops = make_cpu_ops(1);
      m.comm = make_staged_communicator(std::move(m.comm), *ops);
      CHECK_FALSE(m.comm->capturable());
      for (const size_t n : {7, 1025, 32771}) {
        auto v = values_of(rank, n);
        m.comm->all_reduce(vector_of(v));
        if (!same_bits(v, ordered_sum(size, n))) ++wrong;
      }
      for (const int64_t rows : {1, 3}) {
        auto mine = values_of(rank, static_cast<size_t>(rows) * 5);
        std::vector<float> out(mine.size() * static_cast<size_t>(size)), all(out.size());
        m.comm->gather(matrix_of(mine, rows), rank == 0 ? matrix_of(out, rows) : Tensor{});
        m.comm->all_gather(matrix_of(mine, rows), matrix_of(all, rows));
        if (rank == 0 && !same_bits(out, all)) ++wrong;
        auto last = values_of(size - 1, mine.size());
        const Tensor theirs = matrix_of(all, rows).columns(5 * (size - 1), int64_t{5} * size);
        for (int64_t r = 0; r < rows; ++r)
          if (std::memcmp(theirs[r].data, matrix_of(last, rows)[r].data, 5 * sizeof(float)) != 0) ++wrong;
        m.comm->broadcast(matrix_of(mine, rows), size - 1);
        if (!same_bits(mine, last)) ++wrong;
      }
      m.comm->check();
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("NCCL is for GPUs, and says so") {
  const auto ops = make_cpu_ops(1);
  const auto one = make_single_communicator();
  const Code code = code_of([&] { make_nccl_communicator(*one, *ops, kWait); });
  CHECK((code == Code::unavailable || code == Code::internal));
}

TEST_CASE("the order of the test's sums matters") {  // or the test above would prove nothing
  auto backwards = values_of(2, 100);
  for (int r = 1; r >= 0; --r) {
    const auto v = values_of(r, 100);
    for (size_t i = 0; i < v.size(); ++i) backwards[i] += v[i];
  }
  CHECK_FALSE(same_bits(backwards, ordered_sum(3, 100)));
}

TEST_CASE("gather, all_gather and broadcast move rows") {
  for (const int size : {2, 3}) {
    CAPTURE(size);
    std::atomic<int> wrong = 0;
    run_group(size, [&](Member& m, int rank) {
      for (const auto& [rows, n] : {std::pair{1, 5}, std::pair{3, 7}, std::pair{2, 40000}, std::pair{5, 20001}}) {
        const auto cells = static_cast<size_t>(rows) * static_cast<size_t>(n);
        // A column view: the row pitch is larger than the row.
        std::vector<float> wide(static_cast<size_t>(rows) * static_cast<size_t>(n + 3)), mine = values_of(rank, cells);
        const Tensor view = matrix_of(wide, rows).columns(0, n);
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(view[r].data, matrix_of(mine, rows)[r].data, static_cast<size_t>(n) * sizeof(float));
        const bool everywhere = rank % 2 == 0;
        std::vector<float> expected(cells * static_cast<size_t>(size)), out(expected.size()), all(expected.size());
        for (int part = 0; part < size; ++part) {
          auto theirs = values_of(part, cells);
          for (int64_t r = 0; r < rows; ++r)
            std::memcpy(matrix_of(expected, rows).columns(part * n, (part + 1) * n)[r].data,
                        matrix_of(theirs, rows)[r].data, static_cast<size_t>(n) * sizeof(float));
        }
        m.comm->gather(everywhere ? view : matrix_of(mine, rows), rank == 0 ? matrix_of(out, rows) : Tensor{});
        if (rank == 0 && !same_bits(out, expected)) ++wrong;
        m.comm->all_gather(view, matrix_of(all, rows));
        if (!same_bits(all, expected)) ++wrong;
        auto shared = values_of(rank, cells);
        m.comm->broadcast(vector_of(shared), size - 1);
        if (!same_bits(shared, values_of(size - 1, cells))) ++wrong;
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("abort wakes a blocked collective, and later ones throw at once") {
  run_group(2, [&](Member& m, int rank) {
    std::vector<float> v(1000);
    if (rank == 1) {
      m.links[0]->receive();  // never calls a collective
      return;
    }
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      m.comm->abort();
    });
    CHECK(code_of([&] { m.comm->all_reduce(vector_of(v)); }) == Code::peer_lost);
    other.join();
    CHECK(code_of([&] { m.comm->all_reduce(vector_of(v)); }) == Code::peer_lost);
    m.links[0]->send({});
  });
}

TEST_CASE("a collective the peer never joins ends at the timeout") {
  run_group(
      2,
      [&](Member& m, int rank) {
        std::vector<float> v(1000);
        if (rank == 1) {
          m.links[0]->receive();
          return;
        }
        CHECK(code_of([&] { m.comm->all_reduce(vector_of(v)); }) == Code::peer_lost);
        m.links[0]->send({});
      },
      std::chrono::milliseconds(300));
}

TEST_CASE("a killed peer is peer_lost, on the collective and on the control link") {
  const uint16_t port = free_port();
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    try {
      Member m = join_group(1, 2, port);
      std::vector<float> v(1000);
      for (;;) m.comm->all_reduce(vector_of(v));
    } catch (...) {
    }
    ::_exit(1);
  }
  Member m = join_group(0, 2, port);
  std::vector<float> v(1000);
  for (int i = 0; i < 10; ++i) m.comm->all_reduce(vector_of(v));
  REQUIRE(::kill(pid, SIGKILL) == 0);
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(code_of([&] {
          for (int i = 0; i < 3; ++i) m.comm->all_reduce(vector_of(v));  // what it had sent before may still arrive
        }) == Code::peer_lost);
  CHECK(code_of([&] { m.links[0]->receive(); }) == Code::peer_lost);
}
