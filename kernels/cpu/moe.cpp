// Mixture of experts: all rows of one expert together, so that each weight is read (and each EXL3 tile decoded) once
// for a block of rows. Every pair (row, expert) is computed as if alone; only the final sum brings the pairs of a row
// together, in ascending expert id.
#include <algorithm>
#include <cstring>
#include <string>

#include "common/error.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/hot.h"
#include "kernels/cpu/pointwise.h"
#include "kernels/cpu/trellis.h"

namespace glm53::cpu {

namespace {

constexpr int64_t kBlock = 128;

void expect_expert(std::string_view argument, const Weight& w, int64_t out, int64_t in) {
  if (w.format != WeightFormat::exl3) return expect_plain("moe", argument, w, out, in);
  expect_trellis("moe", w);
  if (w.out != out || w.in != in) {
    throw Error(Code::internal,
                "moe: " + std::string(argument) + " is [" + std::to_string(w.out) + ", " + std::to_string(w.in) + "]",
                "[" + std::to_string(out) + ", " + std::to_string(in) + "]");
  }
}

/// Whether two projections take the same prepared input.
bool same_input(const Weight& a, const Weight& b) {
  const bool rotated = a.format == WeightFormat::exl3;
  if (rotated != (b.format == WeightFormat::exl3)) return false;
  return !rotated || a.suh.data == b.suh.data || std::memcmp(a.suh.data, b.suh.data, a.suh.bytes()) == 0;
}

}  // namespace

void CpuOps::collect_pairs(const MoeArgs& args) {
  const auto experts = static_cast<int64_t>(args.gate.size());
  const int64_t rows = args.index.dim(0), k = args.index.dim(1);
  const auto at = [&](int64_t r, int64_t j) { return args.index.as<const int32_t>()[r * args.index.stride[0] + j]; };
  auto* first = scratch(Area::sort).get<int64_t>(static_cast<size_t>(experts + 1));
  std::fill_n(first, experts + 1, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < k; ++j) {
      const int32_t e = at(r, j);
      if (e < -1 || e >= experts) {
        throw Error(Code::internal, "moe: row " + std::to_string(r) + " chose expert " + std::to_string(e),
                    "-1 … " + std::to_string(experts - 1));
      }
      if (e >= 0) ++first[e + 1];
    }
  }
  pairs_.runs.clear();
  pairs_.longest = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (first[e + 1] > 0) pairs_.runs.push_back({static_cast<int32_t>(e), first[e], first[e] + first[e + 1]});
    pairs_.longest = std::max(pairs_.longest, first[e + 1]);
    first[e + 1] += first[e];
  }
  const auto total = static_cast<size_t>(first[experts]);
  pairs_.row.resize(total);
  pairs_.weight.resize(total);
  pairs_.input.resize(total);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < k; ++j) {
      const int32_t e = at(r, j);
      if (e < 0) continue;
      const auto p = static_cast<size_t>(first[e]++);
      pairs_.row[p] = static_cast<int32_t>(r);
      pairs_.weight[p] = args.weight.as<const float>()[r * args.weight.stride[0] + j];
    }
  }
}

void CpuOps::prepare_inputs(std::span<const Weight> experts, int64_t in, float* prepared) {
  const auto total = static_cast<int64_t>(pairs_.row.size());
  pool().parallel_for_worker(total, 1, [&](int worker, int64_t begin, int64_t end) {
    float* suh = worker_scratch(worker).get<float>(static_cast<size_t>(in));
    for (const ExpertRun& run : pairs_.runs) {
      const int64_t from = std::max(begin, run.begin), to = std::min(end, run.end);
      if (from >= to) continue;
      const Weight& w = experts[static_cast<size_t>(run.expert)];
      const bool rotated = w.format == WeightFormat::exl3;
      if (rotated) widen_scales(w.suh, suh);
      for (int64_t p = from; p < to; ++p) {
        const float*& input = pairs_.input[static_cast<size_t>(p)];
        float* out = prepared + p * in;
        if (rotated) {
          rotate_input(input, suh, in, out);
        } else if (input != out) {
          std::copy_n(input, in, out);
        }
        input = out;
      }
    }
  });
}

void CpuOps::project(std::span<const Weight> experts, int64_t in, int64_t width, float* out) {
  const auto runs = static_cast<int64_t>(pairs_.runs.size());
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  const size_t work = std::max(trellis_block_scratch(pairs_.longest), dense_scratch(pairs_.longest));
  // Blocks are outermost so that each worker gets a share of every expert, however unevenly rows are spread.
  pool().parallel_for_worker(blocks * runs, 1, [&](int worker, int64_t begin, int64_t end) {
    float* memory = worker_scratch(worker).get<float>(work);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / runs;
      const ExpertRun& run = pairs_.runs[static_cast<size_t>(item % runs)];
      const Weight& w = experts[static_cast<size_t>(run.expert)];
      const float* const* input = pairs_.input.data() + run.begin;
      float* to = out + run.begin * width;
      if (w.format == WeightFormat::exl3) {
        trellis_block(w, block, {input, static_cast<size_t>(run.end - run.begin)}, memory,
                      [&](int64_t r, const float* y) { std::copy_n(y, kBlock, to + r * width + block * kBlock); });
      } else {
        hot_kernels().dense({.w = w.codes.data,
                             .bf16 = w.format == WeightFormat::bf16,
                             .in = in,
                             .out_begin = block * kBlock,
                             .out_end = std::min((block + 1) * kBlock, width),
                             .x = *input,  // prepared inputs of a run follow each other
                             .x_stride = in,
                             .rows = run.end - run.begin,
                             .y = to,
                             .y_stride = width,
                             .beta = 0,
                             .scratch = memory});
      }
    }
  });
}

void CpuOps::combine(const MoeArgs& args, const float* down) {
  const int64_t rows = args.out.dim(0), hidden = args.out.dim(1);
  pool().parallel_for(hidden, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < rows; ++r)
      std::fill_n(args.out.as<float>() + r * args.out.stride[0] + begin, end - begin, 0.0f);
    for (size_t p = 0; p < pairs_.row.size(); ++p) {
      float* out = args.out.as<float>() + pairs_.row[p] * args.out.stride[0];
      const float* y = down + static_cast<int64_t>(p) * hidden;
      const float weight = pairs_.weight[p];
      for (int64_t d = begin; d < end; ++d) out[d] += weight * y[d];
    }
  });
}

void CpuOps::moe(const MoeArgs& args) {
  expect("moe", "x", args.x, Dtype::f32, {-1, -1});
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1);
  expect("moe", "out", args.out, Dtype::f32, {rows, hidden});
  expect("moe", "index", args.index, Dtype::i32, {rows, -1});
  expect("moe", "weight", args.weight, Dtype::f32, {rows, args.index.dim(1)});
  expect_that(args.gate.size() == args.up.size() && args.gate.size() == args.down.size(), "moe",
              "gate, up and down must have one weight an expert");
  collect_pairs(args);
  if (pairs_.runs.empty()) return zero(args.out);
  const int64_t inter = args.gate.front().out;
  bool shared = true;
  for (const ExpertRun& run : pairs_.runs) {
    const auto e = static_cast<size_t>(run.expert);
    expect_expert("gate", args.gate[e], inter, hidden);
    expect_expert("up", args.up[e], inter, hidden);
    expect_expert("down", args.down[e], hidden, inter);
    shared = shared && same_input(args.gate[e], args.up[e]);
  }
  const size_t total = pairs_.row.size();
  const auto take_inputs = [&] {
    for (size_t p = 0; p < total; ++p) pairs_.input[p] = args.x.as<const float>() + pairs_.row[p] * args.x.stride[0];
  };
  float* prepared = scratch(Area::rotated).get<float>(total * static_cast<size_t>(hidden));
  float* gate = scratch(Area::gate).get<float>(total * static_cast<size_t>(inter));
  float* up = scratch(Area::up).get<float>(total * static_cast<size_t>(inter));
  float* down = scratch(Area::pairs).get<float>(total * static_cast<size_t>(hidden));
  take_inputs();
  prepare_inputs(args.gate, hidden, prepared);
  project(args.gate, hidden, inter, gate);
  if (!shared) {
    take_inputs();
    prepare_inputs(args.up, hidden, prepared);
  }
  project(args.up, hidden, inter, up);
  pool().parallel_for(static_cast<int64_t>(total) * inter, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) gate[i] = swiglu_value(gate[i], up[i], args.limit);
  });
  for (size_t p = 0; p < total; ++p) pairs_.input[p] = gate + static_cast<int64_t>(p) * inter;
  prepare_inputs(args.down, inter, gate);
  project(args.down, inter, hidden, down);
  combine(args, down);
}

}  // namespace glm53::cpu
