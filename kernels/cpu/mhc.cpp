// Manifold-constrained hyper-connections (model §3), fp32 throughout.
#include <algorithm>
#include <array>

#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/hot.h"
#include "kernels/cpu/pointwise.h"

namespace glm53::cpu {

namespace {

constexpr int64_t kMaxStreams = 16;
using Comb = std::array<float, kMaxStreams * kMaxStreams>;

/// Softmax of each row, then alternating column and row divisions: `iterations` column steps with a row step between
/// two of them.
void sinkhorn(Comb& c, size_t n, float eps, int iterations) {
  for (size_t i = 0; i < n; ++i) {
    float* row = c.data() + i * n;
    const float top = *std::max_element(row, row + n);
    float total = 0;
    for (size_t j = 0; j < n; ++j) total += row[j] = std::exp(row[j] - top);
    for (size_t j = 0; j < n; ++j) row[j] = row[j] / total + eps;
  }
  for (int step = 0; step < iterations; ++step) {
    for (size_t i = 0; step > 0 && i < n; ++i) {
      float total = 0;
      for (size_t j = 0; j < n; ++j) total += c[i * n + j];
      for (size_t j = 0; j < n; ++j) c[i * n + j] /= total + eps;
    }
    for (size_t j = 0; j < n; ++j) {
      float total = 0;
      for (size_t i = 0; i < n; ++i) total += c[i * n + j];
      for (size_t i = 0; i < n; ++i) c[i * n + j] /= total + eps;
    }
  }
}

struct Mix {
  const MhcPreArgs& args;
  int64_t n, hidden;

  /// `m` holds fn·X of the row; the RMS factor commutes with fn.
  void row(int64_t r, const float* m) const {
    const auto streams = static_cast<size_t>(n);
    const float* x = args.streams.as<const float>() + r * args.streams.stride[0];
    const float rinv =
        1.0f / std::sqrt(hot_kernels().square_sum(x, n * hidden) / static_cast<float>(n * hidden) + args.rms_eps);
    const auto value = [&](int64_t i, int64_t part) {
      return m[i] * rinv * value_at(*args.site.scale, part) + value_at(*args.site.base, i);
    };
    std::array<float, kMaxStreams> pre{};
    float* post = args.post.as<float>() + r * args.post.stride[0];
    Comb comb{};
    for (int64_t s = 0; s < n; ++s) {
      pre[static_cast<size_t>(s)] = sigmoid(value(s, 0)) + args.hc_eps;
      post[s] = 2.0f * sigmoid(value(n + s, 1));
    }
    for (int64_t i = 0; i < n * n; ++i) comb[static_cast<size_t>(i)] = value(2 * n + i, 2);
    sinkhorn(comb, streams, args.hc_eps, args.sinkhorn);
    std::copy_n(comb.data(), n * n, args.comb.as<float>() + r * args.comb.stride[0]);
    float* u = args.u.as<float>() + r * args.u.stride[0];
    for (int64_t d = 0; d < hidden; ++d) u[d] = pre[0] * x[d];
    for (int64_t s = 1; s < n; ++s) {
      const float* stream = x + s * hidden;
      const float weight = pre[static_cast<size_t>(s)];
      for (int64_t d = 0; d < hidden; ++d) u[d] += weight * stream[d];
    }
    if (args.norm != nullptr) normalise(u, hidden, args.norm, args.rms_eps, u);
  }
};

void expect_streams(std::string_view op, const Tensor& streams) {
  expect(op, "streams", streams, Dtype::f32, {-1, -1, -1});
  expect_that(streams.dim(1) >= 1 && streams.dim(1) <= kMaxStreams, op, "streams must be 1 … 16");
  expect_that(streams.dim(0) <= 1 || streams.stride[0] >= streams.dim(1) * streams.dim(2), op,
              "rows of streams overlap");
  expect_that(streams.dim(1) == 1 || streams.stride[1] == streams.dim(2), op,
              "the streams of a row must be contiguous");
}

/// Small per-row tensors: contiguous within a row.
void expect_row(std::string_view op, std::string_view argument, const Tensor& t, std::initializer_list<int64_t> shape) {
  expect(op, argument, t, Dtype::f32, shape);
  expect_that(t.rank < 3 || t.dim(1) <= 1 || t.stride[1] == t.dim(2), op, "comb must be contiguous within a row");
}

}  // namespace

void CpuOps::mhc_pre(const MhcPreArgs& args) {
  expect_streams("mhc_pre", args.streams);
  const int64_t rows = args.streams.dim(0), n = args.streams.dim(1), hidden = args.streams.dim(2);
  const int64_t values = (2 + n) * n;
  expect_plain("mhc_pre", "fn", *args.site.fn, values, n * hidden);
  expect_plain("mhc_pre", "base", *args.site.base, values, 1);
  expect_plain("mhc_pre", "scale", *args.site.scale, 3, 1);
  if (args.norm != nullptr) expect_plain("mhc_pre", "norm", *args.norm, hidden, 1);
  expect_row("mhc_pre", "post", args.post, {rows, n});
  expect_row("mhc_pre", "comb", args.comb, {rows, n, n});
  expect("mhc_pre", "u", args.u, Dtype::f32, {rows, hidden});
  expect_that(args.sinkhorn >= 1, "mhc_pre", "needs at least one Sinkhorn step");
  if (rows == 0 || hidden == 0) return;
  float* m = scratch(Area::mix).get<float>(static_cast<size_t>(rows * values));
  dense(*args.site.fn, args.streams.as<const float>(), args.streams.stride[0], rows, m, values, 0);
  const Mix mix{args, n, hidden};
  pool().parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) mix.row(r, m + r * values);
  });
}

void CpuOps::mhc_post(const MhcPostArgs& args) {
  expect_streams("mhc_post", args.streams);
  const int64_t rows = args.streams.dim(0), n = args.streams.dim(1), hidden = args.streams.dim(2);
  expect("mhc_post", "y", args.y, Dtype::f32, {rows, hidden});
  expect_row("mhc_post", "post", args.post, {rows, n});
  expect_row("mhc_post", "comb", args.comb, {rows, n, n});
  constexpr int64_t kColumns = 128;
  const int64_t parts = (hidden + kColumns - 1) / kColumns;
  pool().parallel_for(rows * parts, 8, [&](int64_t begin, int64_t end) {
    std::array<float, kMaxStreams * kColumns> next;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t r = item / parts, d = item % parts * kColumns, width = std::min(kColumns, hidden - d);
      float* x = args.streams.as<float>() + r * args.streams.stride[0] + d;
      const float* y = args.y.as<const float>() + r * args.y.stride[0] + d;
      const float* post = args.post.as<const float>() + r * args.post.stride[0];
      const float* comb = args.comb.as<const float>() + r * args.comb.stride[0];
      for (int64_t j = 0; j < n; ++j) {
        float* to = next.data() + j * kColumns;
        for (int64_t c = 0; c < width; ++c) to[c] = post[j] * y[c];
        for (int64_t i = 0; i < n; ++i) {
          const float weight = comb[i * n + j];
          for (int64_t c = 0; c < width; ++c) to[c] += weight * x[i * hidden + c];
        }
      }
      for (int64_t j = 0; j < n; ++j) std::copy_n(next.data() + j * kColumns, width, x + j * hidden);
    }
  });
}

void CpuOps::mhc_post_pre(const MhcPostPreArgs& args) {
  mhc_post(args.post);
  mhc_pre(args.pre);
}

void CpuOps::stream_mean(const StreamMeanArgs& args) {
  expect_streams("stream_mean", args.streams);
  const int64_t rows = args.streams.dim(0), n = args.streams.dim(1), hidden = args.streams.dim(2);
  expect("stream_mean", "out", args.out, Dtype::f32, {rows, hidden});
  pool().parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = args.streams.as<const float>() + r * args.streams.stride[0];
      float* out = args.out.as<float>() + r * args.out.stride[0];
      std::copy_n(x, hidden, out);
      for (int64_t s = 1; s < n; ++s) {
        for (int64_t d = 0; d < hidden; ++d) out[d] += x[s * hidden + d];
      }
      for (int64_t d = 0; d < hidden; ++d) out[d] /= static_cast<float>(n);
    }
  });
}

}  // namespace glm53::cpu
