// linear: dense, quantised and EXL3 weights.
#include <algorithm>

#include "common/error.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/hot.h"
#include "kernels/cpu/trellis.h"
#include "kernels/quantise.h"

namespace glm53::cpu {

namespace {

/// y = v, or v + beta·y without reading y when beta is 0.
void put_row(float* y, const float* v, int64_t n, float beta) {
  if (beta == 0) {
    std::copy_n(v, n, y);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = v[i] + beta * y[i];
  }
}

}  // namespace

void CpuOps::dense(const Weight& w, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                   float beta) {
  if (rows == 0 || w.out == 0) return;
  // Outputs are divided among the workers; rows too where outputs are few.
  const int64_t tiles = (w.out + kPanelOuts - 1) / kPanelOuts;
  const int64_t wanted = (2 * pool().threads() + tiles - 1) / tiles;
  const int64_t row_parts = std::clamp<int64_t>(pool().threads() == 1 ? 1 : wanted, 1, (rows + 11) / 12);
  const int64_t row_part = (rows + row_parts - 1) / row_parts;
  pool().parallel_for_worker(tiles * row_parts, 1, [&](int worker, int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t part = begin / tiles, first = begin % tiles;
      const int64_t last = std::min(tiles, first + end - begin);
      const int64_t row = std::min(part * row_part, rows), count = std::min(row_part, rows - row);
      hot_kernels().dense({.w = w.codes.data,
                           .bf16 = w.format == WeightFormat::bf16,
                           .in = w.in,
                           .out_begin = first * kPanelOuts,
                           .out_end = std::min(last * kPanelOuts, w.out),
                           .x = x + row * x_stride,
                           .x_stride = x_stride,
                           .rows = count,
                           .y = y + row * y_stride,
                           .y_stride = y_stride,
                           .beta = beta,
                           .scratch = worker_scratch(worker).get<float>(dense_scratch(count))});
      begin += last - first;
    }
  });
}

void CpuOps::linear_exl3(const LinearArgs& args) {
  const Weight& w = *args.w;
  expect_trellis("linear", w);
  const int64_t rows = args.x.dim(0);
  float* suh = scratch(Area::rotated).get<float>(static_cast<size_t>((rows + 1) * w.in));
  float* rotated = suh + w.in;
  widen_scales(w.suh, suh);
  const float** row = scratch(Area::sort).get<const float*>(static_cast<size_t>(rows));
  pool().parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      rotate_input(args.x.as<const float>() + r * args.x.stride[0], suh, w.in, rotated + r * w.in);
      row[r] = rotated + r * w.in;
    }
  });
  pool().parallel_for_worker(w.out / 128, 1, [&](int worker, int64_t begin, int64_t end) {
    float* work = worker_scratch(worker).get<float>(trellis_block_scratch(rows));
    for (int64_t block = begin; block < end; ++block) {
      trellis_block(w, block, {row, static_cast<size_t>(rows)}, work, [&](int64_t r, const float* v) {
        put_row(args.y.as<float>() + r * args.y.stride[0] + block * 128, v, 128, args.beta);
      });
    }
  });
}

void CpuOps::linear_quantised(const LinearArgs& args) {
  const Weight& w = *args.w;
  const int64_t rows = args.x.dim(0), tiles = (w.out + kPanelOuts - 1) / kPanelOuts;
  const size_t panel = static_cast<size_t>(kPanelOuts * w.in);
  pool().parallel_for_worker(tiles, 1, [&](int worker, int64_t begin, int64_t end) {
    float* values = worker_scratch(worker).get<float>(panel + dense_scratch(rows));
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kPanelOuts, outs = std::min(kPanelOuts, w.out - first);
      for (int64_t o = 0; o < outs; ++o) dequantise_row(w, first + o, values + o * w.in);
      hot_kernels().dense({.w = values,
                           .bf16 = false,
                           .in = w.in,
                           .out_begin = 0,
                           .out_end = outs,
                           .x = args.x.as<const float>(),
                           .x_stride = args.x.stride[0],
                           .rows = rows,
                           .y = args.y.as<float>() + first,
                           .y_stride = args.y.stride[0],
                           .beta = args.beta,
                           .scratch = values + panel});
    }
  });
}

void CpuOps::linear(const LinearArgs& args) {
  const Weight& w = *args.w;
  expect("linear", "x", args.x, Dtype::f32, {-1, w.in});
  expect("linear", "y", args.y, Dtype::f32, {args.x.dim(0), w.out});
  if (args.x.dim(0) == 0 || w.out == 0) return;
  if (w.format == WeightFormat::exl3) return linear_exl3(args);
  if (is_quantised(w.format)) {
    expect_quantised("linear", w);
    return linear_quantised(args);
  }
  expect_plain("linear", "w", w, w.out, w.in);
  dense(w, args.x.as<const float>(), args.x.stride[0], args.x.dim(0), args.y.as<float>(), args.y.stride[0], args.beta);
}

}  // namespace glm53::cpu
