// Time of one all-reduce on loopback, by ranks and message size: the cost that a forward pass on CPUs pays twice a
// layer.
//   bench_comm [iterations]        prints a table and one JSON line
// Each rank is a process. The median of rank 0 is reported; the ranks run in lock step, so theirs are alike.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <unistd.h>
#include <vector>

#include <sys/wait.h>

#include "common/error.h"
#include "common/socket.h"
#include "common/strings.h"
#include "engine/comm/communicator.h"
#include "engine/comm/control_link.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kWait{20000};

struct Timing {
  size_t bytes;
  double median_us, p90_us;
};

std::unique_ptr<Communicator> connect(int rank, int size, uint16_t port,
                                      std::vector<std::unique_ptr<ControlLink>>& links) {
  Hello hello;
  hello.rank = rank;
  hello.size = size;
  if (rank == 0)
    links = accept_ranks("127.0.0.1", port, hello, kWait);
  else
    links.push_back(join_rank0("127.0.0.1", port, hello, kWait));
  std::vector<ControlLink*> views;
  for (const auto& link : links) views.push_back(link.get());
  return make_gloo_communicator({rank, size}, "127.0.0.1", views, kWait);
}

std::vector<Timing> measure(Communicator& comm, int iterations) {
  std::vector<Timing> timings;
  for (size_t bytes = 1024; bytes <= (1u << 20); bytes *= 4) {
    std::vector<float> values(bytes / sizeof(float), 1.0f);
    const Tensor io = Tensor::of(values.data(), Dtype::f32, {static_cast<int64_t>(values.size())});
    std::vector<double> us;
    for (int i = 0; i < iterations + 20; ++i) {
      const auto begin = Clock::now();
      comm.all_reduce(io);
      if (i >= 20) us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
      std::fill(values.begin(), values.end(), 1.0f);
    }
    std::sort(us.begin(), us.end());
    timings.push_back({bytes, us[us.size() / 2], us[us.size() * 9 / 10]});
  }
  return timings;
}

/// A rank must not leave while another still is within its last collective.
void meet(std::span<const std::unique_ptr<ControlLink>> links, int rank) {
  const std::byte byte{};
  const auto send = [&] {
    for (const auto& link : links) link->send(std::span(&byte, 1));
  };
  const auto receive = [&] {
    for (const auto& link : links) link->receive();
  };
  if (rank != 0) send();
  receive();
  if (rank == 0) send();
}

std::vector<Timing> run_rank(int rank, int size, uint16_t port, int iterations) {
  std::vector<std::unique_ptr<ControlLink>> links;
  const auto comm = connect(rank, size, port, links);
  auto timings = measure(*comm, iterations);
  meet(links, rank);
  return timings;
}

std::vector<Timing> run_group(int size, int iterations) {
  const uint16_t port = [] { return local_port(listen_tcp("127.0.0.1", 0).get()); }();
  std::vector<pid_t> children;
  for (int rank = 1; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) throw_errno(Code::internal, "fork");
    if (pid == 0) {  // leaves by _exit: the parent's buffers are not its own
      int code = 0;
      try {
        run_rank(rank, size, port, iterations);
      } catch (const std::exception& e) {
        std::cerr << "rank " << rank << ": " << e.what() << '\n';
        code = 1;
      }
      ::_exit(code);
    }
    children.push_back(pid);
  }
  const auto timings = run_rank(0, size, port, iterations);
  for (const pid_t pid : children) {
    int status = 0;
    if (::waitpid(pid, &status, 0) != pid || status != 0) throw Error(Code::internal, "a rank of the benchmark failed");
  }
  return timings;
}

int run(int iterations) {
  std::string json;
  std::puts("ranks     bytes   median us      p90 us");
  for (const int size : {2, 3, 4}) {
    for (const Timing& t : run_group(size, iterations)) {
      std::printf("%5d %9zu %11.1f %11.1f\n", size, t.bytes, t.median_us, t.p90_us);
      json += cat(json.empty() ? "" : ",", "{\"ranks\":", size, ",\"bytes\":", t.bytes, ",\"median_us\":", t.median_us,
                  ",\"p90_us\":", t.p90_us, "}");
    }
  }
  std::printf("{\"bench\":\"all_reduce\",\"transport\":\"gloo tcp\",\"results\":[%s]}\n", json.c_str());
  return 0;
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  try {
    const int64_t iterations = argc > 1 ? glm53::parse_int(argv[1]).value_or(0) : 2000;
    if (iterations < 1 || iterations > 1000000)
      throw glm53::Error(glm53::Code::usage, "usage: bench_comm [iterations]");
    if (std::signal(SIGPIPE, SIG_IGN) == SIG_ERR)
      throw glm53::Error(glm53::Code::internal, "SIGPIPE cannot be ignored");
    return glm53::run(static_cast<int>(iterations));
  } catch (const std::exception& e) {
    std::cerr << "bench_comm: " << e.what() << '\n';
    return 1;
  }
}
