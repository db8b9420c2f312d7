// NCCL's part of the communicator on one GPU: a group of one, which goes through the same calls as a larger one. Groups
// of two are tried by serving (bench/device_serve.sh cuda2-nccl).
#include <cstring>
#include <numeric>

#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/comm/communicator.h"
#include "tests/device/device.h"

using namespace glm53;
using namespace glm53::test;

namespace {

constexpr std::chrono::milliseconds kWait{30000};

std::vector<float> counting(size_t n) {
  std::vector<float> v(n);
  std::iota(v.begin(), v.end(), 1.0F);
  return v;
}

}  // namespace

TEST_CASE("NCCL: collectives of a group of one, in stream order, and after an abort") {
  Device d;
  const auto bootstrap = make_single_communicator();
  const auto comm = make_nccl_communicator(*bootstrap, d.ops(), kWait);
  CHECK(comm->shard().size == 1);
  std::vector<float> values = counting(6 * 40), back(values.size());
  const Tensor host = Tensor::of(values.data(), Dtype::f32, {6, 40});
  const Tensor in = d.put(host), out = d.put(Tensor::of(back.data(), Dtype::f32, {6, 40}));
  const auto came_back = [&](const Tensor& from) {
    std::fill(back.begin(), back.end(), -1.0F);
    d.ops().copy(Tensor::of(back.data(), Dtype::f32, {6, 40}), from);
    d.ops().synchronize();
    return back == values;
  };
  comm->all_reduce(in);
  CHECK(came_back(in));
  comm->gather(in, out);
  CHECK(came_back(out));
  d.ops().zero(out);
  comm->all_gather(in, out);
  CHECK(came_back(out));
  comm->broadcast(in, 0);
  CHECK(came_back(in));
  comm->check();

  // In a graph, run twice.
  const auto graph = d.ops().capture([&] { comm->all_reduce(in); });
  graph->launch();
  graph->launch();
  CHECK(came_back(in));
  comm->check();

  comm->abort();
  comm->abort();
  const auto code_of = [](auto body) {
    try {
      body();
    } catch (const Error& e) {
      return e.code();
    }
    return Code::ok;
  };
  CHECK(code_of([&] { comm->all_reduce(in); }) == Code::peer_lost);
  CHECK(code_of([&] { comm->check(); }) == Code::peer_lost);
}
