// Memory, ordering and plain copies of the CPU backend.
#include "kernels/cpu/cpu_ops.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/hot.h"
#include "kernels/cpu/trellis.h"
#include "kernels/half.h"

namespace glm53 {

std::unique_ptr<Ops> make_cpu_ops(int threads) {
  return std::make_unique<cpu::CpuOps>(threads);
}

namespace cpu {

namespace {

class BodyGraph final : public Graph {
 public:
  explicit BodyGraph(std::function<void()> body) : body_(std::move(body)) {}
  void launch() override { body_(); }

 private:
  std::function<void()> body_;
};

void copy_row(std::byte* dst, Dtype to, const std::byte* src, Dtype from, int64_t n) {
  if (to == from) {
    std::memmove(dst, src, static_cast<size_t>(n) * size_of(to));
  } else if (to == Dtype::f32) {
    auto* d = reinterpret_cast<float*>(dst);
    const auto* s = reinterpret_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < n; ++i) d[i] = bf16_to_f32(s[i]);
  } else {
    auto* d = reinterpret_cast<uint16_t*>(dst);
    const auto* s = reinterpret_cast<const float*>(src);
    for (int64_t i = 0; i < n; ++i) d[i] = f32_to_bf16(s[i]);
  }
}

/// Calls body(offset in dst, offset in src) in elements for every innermost row of two tensors of one shape.
template <class Body>
void each_row(const Tensor& dst, const Tensor& src, Body body) {
  if (dst.elements() == 0) return;
  const size_t outer = dst.rank == 0 ? 0 : dst.rank - 1u;
  std::array<int64_t, 4> at{};
  while (true) {
    int64_t d = 0, s = 0;
    for (size_t i = 0; i < outer; ++i) {
      d += at[i] * dst.stride[i];
      s += at[i] * src.stride[i];
    }
    body(d, s);
    size_t i = outer;
    while (i > 0 && ++at[i - 1] == dst.shape[i - 1]) at[--i] = 0;
    if (i == 0) return;
  }
}

}  // namespace

std::byte* Scratch::raw(size_t bytes) {
  if (memory_.bytes() < bytes) {
    memory_ = Buffer();  // frees first: the old contents are not wanted
    memory_ = host_buffer(bytes);
  }
  return memory_.data();
}

CpuOps::CpuOps(int threads) : pool_(threads), of_worker_(static_cast<size_t>(threads)) {}

Buffer CpuOps::allocate(size_t bytes, Place) {
  return host_buffer(bytes);
}

void CpuOps::reserve(const OpLimits& limits) {
  const auto rows = static_cast<size_t>(std::max(limits.rows, 0)),
             hidden = static_cast<size_t>(std::max(limits.hidden, 0));
  const auto pairs = rows * static_cast<size_t>(std::max(limits.top_k, 1));
  const auto widest = static_cast<size_t>(std::max({limits.widest, limits.hidden, 0}));
  scratch(Area::rotated).get<float>(std::max(pairs * hidden, (rows + 1) * widest));
  scratch(Area::pairs).get<float>(pairs * hidden);
  scratch(Area::logits).get<float>(rows * static_cast<size_t>(std::max(limits.experts, 0)));
  const size_t work = std::max({trellis_block_scratch(limits.rows), dense_scratch(limits.rows),
                                4 * static_cast<size_t>(std::max(limits.vocab, 0))});
  for (Scratch& of_one : of_worker_) of_one.get<float>(work);
}

std::unique_ptr<Graph> CpuOps::capture(const std::function<void()>& body) {
  return std::make_unique<BodyGraph>(body);
}

void CpuOps::copy(Tensor dst, Tensor src) {
  const bool converts =
      (dst.dtype == Dtype::f32 && src.dtype == Dtype::bf16) || (dst.dtype == Dtype::bf16 && src.dtype == Dtype::f32);
  expect_that(dst.dtype == src.dtype || converts, "copy", "dtypes differ and are not f32 and bf16");
  expect_that(dst.rank == src.rank && dst.shape == src.shape, "copy", "shapes differ");
  const int64_t n = dst.rank == 0 ? 1 : dst.dim(dst.rank - 1);
  each_row(dst, src, [&](int64_t d, int64_t s) {
    copy_row(static_cast<std::byte*>(dst.data) + d * static_cast<int64_t>(size_of(dst.dtype)), dst.dtype,
             static_cast<const std::byte*>(src.data) + s * static_cast<int64_t>(size_of(src.dtype)), src.dtype, n);
  });
}

void CpuOps::zero(Tensor dst) {
  const int64_t n = dst.rank == 0 ? 1 : dst.dim(dst.rank - 1);
  const auto item = static_cast<int64_t>(size_of(dst.dtype));
  each_row(dst, dst, [&](int64_t d, int64_t) {
    std::memset(static_cast<std::byte*>(dst.data) + d * item, 0, static_cast<size_t>(n * item));
  });
}

void CpuOps::add(const AddArgs& args) {
  expect_that(args.a.dtype == Dtype::f32 && args.b.dtype == Dtype::f32, "add", "a and b must be f32");
  expect_that(args.a.rank == args.b.rank && args.a.shape == args.b.shape, "add", "shapes differ");
  auto* a = args.a.as<float>();
  const auto* b = args.b.as<const float>();
  if (args.a.contiguous() && args.b.contiguous()) {
    return pool().parallel_for(args.a.elements(), 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) a[i] += b[i];
    });
  }
  const int64_t n = args.a.rank == 0 ? 1 : args.a.dim(args.a.rank - 1);
  each_row(args.a, args.b, [&](int64_t at_a, int64_t at_b) {
    for (int64_t i = 0; i < n; ++i) a[at_a + i] += b[at_b + i];
  });
}

}  // namespace cpu
}  // namespace glm53
