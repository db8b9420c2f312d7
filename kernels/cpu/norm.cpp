// rms_norm, swiglu and embed: one row at a time.
#include <algorithm>

#include "common/error.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/hot.h"
#include "kernels/cpu/pointwise.h"
#include "kernels/half.h"

namespace glm53::cpu {

void normalise(const float* x, int64_t n, const Weight* weight, float eps, float* y) {
  const float r = 1.0f / std::sqrt(hot_kernels().square_sum(x, n) / static_cast<float>(n) + eps);
  if (weight == nullptr || weight->empty()) {
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r;
  } else if (weight->format == WeightFormat::f32) {
    const auto* w = weight->codes.as<const float>();
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r * w[i];
  } else {
    const auto* w = weight->codes.as<const uint16_t>();
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r * bf16_to_f32(w[i]);
  }
}

void CpuOps::rms_norm(const RmsNormArgs& args) {
  expect("rms_norm", "x", args.x, Dtype::f32, {-1, -1});
  const int64_t rows = args.x.dim(0), n = args.x.dim(1);
  expect("rms_norm", "y", args.y, Dtype::f32, {rows, n});
  if (args.weight != nullptr && !args.weight->empty()) expect_plain("rms_norm", "weight", *args.weight, n, 1);
  if (n == 0) return;
  pool().parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      normalise(args.x.as<const float>() + r * args.x.stride[0], n, args.weight, args.eps,
                args.y.as<float>() + r * args.y.stride[0]);
    }
  });
}

void CpuOps::swiglu(const SwigluArgs& args) {
  expect("swiglu", "gate", args.gate, Dtype::f32, {-1, -1});
  const int64_t rows = args.gate.dim(0), n = args.gate.dim(1);
  expect("swiglu", "up", args.up, Dtype::f32, {rows, n});
  expect("swiglu", "out", args.out, Dtype::f32, {rows, n});
  if (n == 0) return;
  pool().parallel_for(rows * n, 1024, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t r = begin / n, first = begin % n, last = std::min(n, first + end - begin);
      const float* gate = args.gate.as<const float>() + r * args.gate.stride[0];
      const float* up = args.up.as<const float>() + r * args.up.stride[0];
      float* out = args.out.as<float>() + r * args.out.stride[0];
      for (int64_t i = first; i < last; ++i) out[i] = swiglu_value(gate[i], up[i], args.limit);
      begin += last - first;
    }
  });
}

namespace {

void widen_row(const void* table, bool bf16, int64_t row, int64_t n, float* out) {
  if (bf16) {
    const auto* from = static_cast<const uint16_t*>(table) + row * n;
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(from[i]);
  } else {
    std::copy_n(static_cast<const float*>(table) + row * n, n, out);
  }
}

}  // namespace

void CpuOps::embed(const EmbedArgs& args) {
  const Weight& table = *args.table;
  const Tensor& given = args.batch->embedding;
  const int64_t n = table.in;
  expect_plain("embed", "table", table, table.out, n);
  expect("embed", "out", args.out, Dtype::f32, {-1, n});
  expect("embed", "token", args.batch->token, Dtype::i32, {args.out.dim(0)});
  if (!given.empty()) {
    expect_that(given.dtype == Dtype::f32 || given.dtype == Dtype::bf16, "embed", "embedding must be f32 or bf16");
    expect("embed", "embedding", given, given.dtype, {args.out.dim(0), n});
    expect_that(given.contiguous(), "embed", "embedding must be contiguous");
  }
  const auto* token = args.batch->token.as<const int32_t>();
  pool().parallel_for(args.out.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* out = args.out.as<float>() + r * args.out.stride[0];
      if (r >= args.batch->rows || (token[r] == -1 && given.empty())) {
        std::fill_n(out, n, 0.0f);
      } else if (token[r] == -1) {
        widen_row(given.data, given.dtype == Dtype::bf16, r, n, out);
      } else if (token[r] < 0 || token[r] >= table.out) {
        throw Error(Code::internal, "embed: row " + std::to_string(r) + " has token " + std::to_string(token[r]),
                    "-1 … " + std::to_string(table.out - 1));
      } else {
        widen_row(table.codes.data, table.format == WeightFormat::bf16, token[r], n, out);
      }
    }
  });
}

}  // namespace glm53::cpu
