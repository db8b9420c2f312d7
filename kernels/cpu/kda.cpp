// Kimi delta attention in the window family, its replay, and the gated norm (spec model §4, runtime §3.3).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/kda_args.h"
#include "kernels/cpu/kda_rows.h"
#include "kernels/cpu/row_gemm.h"

namespace glm53::cpu {
namespace {

// Keeps what a later replay needs: the raw inputs of the window's rows.
void keep_records(const KdaCaches& caches, int64_t slot, int64_t head, const HeadRows& rows) {
  const auto bytes = static_cast<size_t>(caches.dim) * sizeof(float);
  for (int i = 0; i < rows.rows; ++i) {
    float* record = caches.record(slot, i);
    float* at = record + caches.record_head(head);
    std::memcpy(at, rows.k + i * rows.stride, bytes);
    std::memcpy(at + caches.dim, rows.v + i * rows.stride, bytes);
    std::memcpy(at + 2 * caches.dim, rows.gate + i * rows.gate_stride, bytes);
    record[caches.record_beta(head)] = rows.beta[i * rows.beta_stride];
  }
}

}  // namespace

KdaCall::KdaCall(const KdaArgs& args, float* dt_bias, std::string_view op)
    : caches(*args.caches, args.layer, op),
      batch(*args.batch, *args.caches, args.q.dim(0), op),
      args_(args),
      dt_bias_(dt_bias) {
  const int64_t rows = args.q.dim(0), width = caches.heads * caches.dim;
  expect(op, "q", args.q, Dtype::f32, {rows, width});
  expect(op, "k", args.k, Dtype::f32, {rows, width});
  expect(op, "v", args.v, Dtype::f32, {rows, width});
  expect(op, "gate", args.gate, Dtype::f32, {rows, width});
  expect(op, "beta", args.beta, Dtype::f32, {rows, caches.heads});
  expect(op, "out", args.out, Dtype::f32, {rows, width});
  expect_that(args.q.stride[0] == args.k.stride[0] && args.k.stride[0] == args.v.stride[0], op,
              "q, k and v have different row strides");
  widen_gate(*args.a_log, *args.dt_bias, caches, op, dt_bias);
}

HeadRows KdaCall::rows(int64_t head, int64_t begin, int64_t end) const {
  const auto at = [&](const Tensor& t) { return t.as<float>() + begin * t.stride[0] + head * caches.dim; };
  HeadRows r{};
  r.q = at(args_.q);
  r.k = at(args_.k);
  r.v = at(args_.v);
  r.stride = args_.q.stride[0];
  r.gate = at(args_.gate);
  r.gate_stride = args_.gate.stride[0];
  r.beta = args_.beta.as<float>() + begin * args_.beta.stride[0] + head;
  r.beta_stride = args_.beta.stride[0];
  r.out = at(args_.out);
  r.out_stride = args_.out.stride[0];
  r.rows = static_cast<int>(end - begin);
  return r;
}

HeadGate KdaCall::gate(int64_t head) const {
  return {value_at(*args_.a_log, head), dt_bias_ + head * caches.dim, args_.lower_bound};
}

HeadRows recorded_rows(const KdaCaches& caches, int64_t slot, int64_t head, int count, int record_width) {
  const float* record = caches.record(slot, 0);
  HeadRows r{};
  r.k = record + caches.record_head(head);
  r.v = r.k + caches.dim;
  r.gate = r.v + caches.dim;
  r.beta = record + caches.record_beta(head);
  r.stride = r.gate_stride = r.beta_stride = record_width;
  r.rows = count;
  return r;
}

void widen_gate(const Weight& a_log, const Weight& dt_bias, const KdaCaches& caches, std::string_view op, float* to) {
  expect_plain(op, "a_log", a_log, caches.heads, 1);
  expect_plain(op, "dt_bias", dt_bias, caches.heads * caches.dim, 1);
  for (int64_t i = 0; i < caches.heads * caches.dim; ++i) to[i] = value_at(dt_bias, i);
}

void CpuOps::kda_window(const KdaArgs& args) {
  const CacheGeometry& g = args.caches->geometry;
  float* dt_bias = scratch(Area::kda).get<float>(static_cast<size_t>(g.kda_heads) * static_cast<size_t>(g.head_dim));
  const KdaCall call(args, dt_bias, "kda_window");
  const auto floats = static_cast<size_t>(window_scratch(g.head_dim, 2 * g.max_window));
  const auto body = [&](int worker, int64_t begin, int64_t end) {
    float* memory = worker_scratch(worker).get<float>(floats);
    for (int64_t task = begin; task < end; ++task) {
      const SeqRows seq = call.batch.at(task / g.kda_heads);
      const int64_t head = task % g.kda_heads;
      if (seq.slot < 0) continue;
      const HeadRows replay = recorded_rows(call.caches, seq.slot, head, seq.replay, g.record_width());
      const HeadRows window = call.rows(head, seq.begin, seq.end);
      run_window(replay, window, call.gate(head), g.head_dim, call.caches.state(seq.slot, head), memory);
      keep_records(call.caches, seq.slot, head, window);
    }
  };
  pool().parallel_for_worker(call.batch.window_seqs() * g.kda_heads, 1, body);
  for (int64_t row = 0; row < call.batch.window_rows(); ++row) {
    if (call.batch.padding(row)) zero_rows(args.out, row, row + 1);
  }
  zero_rows(args.out, call.batch.rows(), args.out.dim(0));
}

void CpuOps::kda_flush(const FlushArgs& args) {
  const std::string_view op = "kda_flush";
  const CacheGeometry& g = args.caches->geometry;
  const auto pairs = static_cast<int64_t>(args.slots.size());
  expect_that(args.replay.size() == args.slots.size(), op, "slots and replay have different lengths");
  expect_that(args.a_log.size() == static_cast<size_t>(g.kda_layers) && args.dt_bias.size() == args.a_log.size(), op,
              "a_log and dt_bias need one weight per KDA layer");
  for (size_t i = 0; i < args.slots.size(); ++i) {
    const auto slot = static_cast<int32_t>(args.slots[i]);
    const int64_t slots = args.caches->state.empty() ? 0 : args.caches->state.dim(0);
    expect_that(slot >= -1 && slot < slots, op, "a slot is outside the pool");
    expect_that(args.replay[i] >= 0 && args.replay[i] <= g.max_window, op, "a replay is longer than max_window");
  }
  float* dt_bias = scratch(Area::kda).get<float>(static_cast<size_t>(g.kda_heads) * static_cast<size_t>(g.head_dim));
  const auto floats = static_cast<size_t>(window_scratch(g.head_dim, g.max_window));
  for (int layer = 0; layer < g.kda_layers; ++layer) {
    const KdaCaches caches(*args.caches, layer, op);
    const auto at = static_cast<size_t>(layer);
    widen_gate(*args.a_log[at], *args.dt_bias[at], caches, op, dt_bias);
    const auto body = [&](int worker, int64_t begin, int64_t end) {
      float* memory = worker_scratch(worker).get<float>(floats);
      for (int64_t task = begin; task < end; ++task) {
        const auto pair = static_cast<size_t>(task / g.kda_heads);
        const int64_t head = task % g.kda_heads;
        const auto slot = static_cast<int32_t>(args.slots[pair]);
        if (slot < 0) continue;
        const HeadRows replay = recorded_rows(caches, slot, head, args.replay[pair], g.record_width());
        const HeadGate gate{value_at(*args.a_log[at], head), dt_bias + head * g.head_dim, args.lower_bound};
        run_window(replay, HeadRows{}, gate, g.head_dim, caches.state(slot, head), memory);
        // q, k and v channels of this head.
        for (int64_t third = 0; third < 3; ++third) {
          const int64_t first = (third * g.kda_heads + head) * g.head_dim;
          shift_history(caches, caches.conv(slot), args.replay[pair], first, first + g.head_dim);
        }
      }
    };
    pool().parallel_for_worker(pairs * g.kda_heads, 1, body);
  }
}

void CpuOps::gated_norm(const GatedNormArgs& args) {
  const std::string_view op = "gated_norm";
  const int64_t rows = args.o.dim(0), width = args.o.dim(1);
  expect_that(args.dim > 0 && width % args.dim == 0, op, "the width of o is not a multiple of dim");
  expect(op, "o", args.o, Dtype::f32, {rows, width});
  expect(op, "gate", args.gate, Dtype::f32, {rows, width});
  expect(op, "y", args.y, Dtype::f32, {rows, width});
  expect_plain(op, "weight", *args.weight, args.dim, 1);
  const int64_t heads = width / args.dim;
  pool().parallel_for(rows * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / heads, column = task % heads * args.dim;
      const float* o = args.o.as<float>() + row * args.o.stride[0] + column;
      const float* gate = args.gate.as<float>() + row * args.gate.stride[0] + column;
      float* y = args.y.as<float>() + row * args.y.stride[0] + column;
      const float r = 1.0F / std::sqrt(dot(o, o, args.dim) / static_cast<float>(args.dim) + args.eps);
      for (int64_t i = 0; i < args.dim; ++i) y[i] = o[i] * r * value_at(*args.weight, i) * sigmoid(gate[i]);
    }
  });
}

}  // namespace glm53::cpu
