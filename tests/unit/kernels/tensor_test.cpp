// Tensors, buffers and arenas.
#include "kernels/tensor.h"

#include <cstring>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include "common/error.h"
#include "kernels/ops.h"

namespace glm53 {
namespace {

TEST_CASE("views address the elements they name") {
  std::vector<int32_t> v(2 * 3 * 4);
  std::iota(v.begin(), v.end(), 0);
  const Tensor t = Tensor::of(v.data(), Dtype::i32, {2, 3, 4});
  CHECK(t.elements() == 24);
  CHECK(t.bytes() == 96);
  CHECK(t.contiguous());
  CHECK(t[1].rank == 2);
  CHECK(t[1][2].as<int32_t>()[3] == 23);
  CHECK(t.rows(1, 2).shape[0] == 1);
  CHECK(*t.rows(1, 2).as<int32_t>() == 12);
  const Tensor c = t[0].columns(1, 3);
  CHECK_FALSE(c.contiguous());
  CHECK(c.stride[0] == 4);
  CHECK(c[2].as<int32_t>()[1] == 10);
  CHECK(t.columns(2, 2).elements() == 0);
  CHECK(t.reshaped({4, 6})[3].as<int32_t>()[5] == 23);
  CHECK(c.rows(1, 2).contiguous());  // one row of a view has no gaps
  CHECK(Tensor{}.empty());
}

TEST_CASE("impossible views are refused") {
  float x = 0;
  const Tensor t = Tensor::of(&x, Dtype::f32, {1, 1});
  CHECK_THROWS_AS(t.rows(0, 2), Error);
  CHECK_THROWS_AS(t.rows(1, 0), Error);
  CHECK_THROWS_AS(t.columns(-1, 1), Error);
  CHECK_THROWS_AS(t[1], Error);
  CHECK_THROWS_AS(t.reshaped({2}), Error);
  CHECK_THROWS_AS(Tensor{}[0], Error);
  CHECK_THROWS_AS(Tensor::of(&x, Dtype::f32, {-1}), Error);
  CHECK_THROWS_AS(Tensor::of(&x, Dtype::f32, {1, 1, 1, 1, 1}), Error);
  CHECK_THROWS_AS(Tensor::of(&x, Dtype::f32, {int64_t{1} << 40, int64_t{1} << 40}), Error);
}

TEST_CASE("buffers are zero, aligned and bounded") {
  const Buffer b = host_buffer(1000);
  CHECK(b.bytes() == 1000);
  CHECK(reinterpret_cast<uintptr_t>(b.data()) % 256 == 0);
  for (size_t i = 0; i < b.bytes(); ++i) REQUIRE(b.data()[i] == std::byte{0});
  CHECK(b.view(Dtype::u8, {1000}).data == b.data());
  CHECK(b.view(Dtype::f32, {2, 3}, 976).data == b.data() + 976);
  CHECK_THROWS_AS(b.view(Dtype::f32, {2, 3}, 977), Error);
  CHECK_THROWS_AS(b.view(Dtype::u8, {0}, 1001), Error);
  CHECK(host_buffer(0).view(Dtype::f32, {0}).empty());
  CHECK(Buffer().bytes() == 0);
  CHECK_THROWS_AS(host_buffer(SIZE_MAX - 5), Error);
}

TEST_CASE("arenas hand out aligned parts until they are full") {
  Arena arena(host_buffer(1024));
  const Tensor a = arena.take(Dtype::f32, {3});
  const size_t mark = arena.mark();
  const Tensor b = arena.take(Dtype::bf16, {2, 2});
  CHECK(static_cast<std::byte*>(b.data) - static_cast<std::byte*>(a.data) == 256);
  arena.take(Dtype::u8, {512});
  CHECK(arena.high_water() == 1024);
  CHECK_THROWS_AS(arena.take(Dtype::u8, {1}), Error);
  arena.reset(mark);
  CHECK(arena.take(Dtype::u8, {1}).data == b.data);
  CHECK(arena.high_water() == 1024);
  try {
    arena.take(Dtype::f32, {1000});
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.code() == Code::memory);
    CHECK(std::string(e.what()).find("4000") != std::string::npos);
  }
  CHECK_THROWS_AS(Arena().take(Dtype::u8, {1}), Error);
}

TEST_CASE("copy converts, keeps strides apart, and checks shapes; zero clears a view only") {
  const auto ops = make_cpu_ops(1);
  std::vector<float> a = {1, 2, 3, 4, 5, 6}, back(6, -1);
  std::vector<uint16_t> half(6);
  const Tensor ta = Tensor::of(a.data(), Dtype::f32, {2, 3});
  const Tensor th = Tensor::of(half.data(), Dtype::bf16, {2, 3});
  const Tensor tb = Tensor::of(back.data(), Dtype::f32, {2, 3});
  ops->copy(th, ta);
  CHECK(half[5] == 0x40c0);
  ops->copy(tb.columns(1, 3), th.columns(0, 2));
  CHECK(back == std::vector<float>{-1, 1, 2, -1, 4, 5});
  ops->zero(tb.columns(0, 2));
  CHECK(back == std::vector<float>{0, 0, 2, 0, 0, 5});
  CHECK_THROWS_AS(ops->copy(tb, ta.columns(0, 2)), Error);
  CHECK_THROWS_AS(ops->copy(Tensor::of(half.data(), Dtype::f16, {2, 3}), ta), Error);
  ops->copy(tb.rows(0, 0), ta.rows(1, 1));
  CHECK(back[2] == 2);
}

TEST_CASE("a captured body runs when launched") {
  const auto ops = make_cpu_ops(1);
  int runs = 0;
  const auto graph = ops->capture([&] { ++runs; });
  const int before = runs;
  graph->launch();
  graph->launch();
  CHECK(runs - before == 2);
  CHECK(ops->done(ops->record()));
}

}  // namespace
}  // namespace glm53
