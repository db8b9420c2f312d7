// Time of single operators on a GPU, with the real shapes of one rank of two: what a step is made of.
//   bench_ops [--json FILE] [--only WORD] [--reps N]
// Each figure is the median over N launches of a CUDA graph in which the operator runs many times in a row, over
// weights that rotate through more memory than the second-level cache holds. GB/s counts the bytes that must be read
// and written once; "of copy" is their share of what a copy on this card moves, measured at the start.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu_bench.h"
#include "bench/step_ops.h"
#include "kernels/half.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

constexpr int64_t kHidden = 4096, kInter = 1024, kExperts = 288;

struct Shape {
  int64_t out, in;
};
constexpr Shape kLinears[] = {{77440, 4096}, {26048, 4096}, {12288, 4096}, {9216, 4096}, {4096, 8192},
                              {6144, 4096},  {4096, 4096},  {2048, 4096},  {4096, 1024}, {256, 4096}};

/// A weight of any dense format whose bytes lie at `at` in memory.
Weight dense_weight(WeightFormat format, const Shape& s, const Buffer& memory, size_t at, const Buffer& scales) {
  Weight w;
  if (is_quantised(format)) {
    w = quantised_weight(format, s.out, s.in, nullptr, nullptr, Place::device);
    w.codes = memory.view(w.codes.dtype, std::span(w.codes.shape).first(w.codes.rank), at);
    const bool cold = format == WeightFormat::int4_g32;  // its scales are many, and lie behind the codes
    w.scales = (cold ? memory : scales)
                   .view(w.scales.dtype, std::span(w.scales.shape).first(w.scales.rank),
                         cold ? at + static_cast<size_t>(code_bytes(format, s.out, s.in)) : 0);
    return w;
  }
  w.format = format;
  w.out = s.out;
  w.in = s.in;
  w.codes = memory.view(Dtype::bf16, {s.out, s.in}, at);
  return w;
}

void bench_linear(Bench& bench, WeightFormat format, const std::string& name) {
  if (!bench.wanted(name)) return;
  for (const Shape& shape : kLinears) {
    const auto [out, in] = shape;
    const size_t one = is_quantised(format)
                           ? static_cast<size_t>(code_bytes(format, out, in) + scale_bytes(format, out, in))
                           : static_cast<size_t>(out * in) * 2;
    const int copies = static_cast<int>(kCold / one) + 1, calls = std::max(copies, 8);
    const Buffer memory = bench.filled(one * static_cast<size_t>(copies));
    const Buffer scales = bench.upload(std::vector<float>(static_cast<size_t>(out), 0.25F));
    std::vector<Weight> weights;
    for (int i = 0; i < copies; ++i) {
      weights.push_back(dense_weight(format, shape, memory, one * static_cast<size_t>(i), scales));
    }
    for (const int64_t rows : {1, 2, 4, 8, 16, 32, 256, 2048}) {
      if (rows > 32 && out > 30000) continue;
      const Buffer x = bench.filled(static_cast<size_t>(rows * in) * 2);
      const Buffer y = bench.ops().allocate(static_cast<size_t>(rows * out) * 2, Place::device);
      const LinearArgs args{.x = x.view(Dtype::bf16, {rows, in}),
                            .w = nullptr,
                            .y = y.view(Dtype::bf16, {rows, out}),
                            .beta = 0,
                            .window_rows = rows <= 32 ? static_cast<int>(rows) : 0};
      const double us = bench.time(rows > 32 ? 8 : calls, [&](int i) {
        LinearArgs call = args;
        call.w = &weights[static_cast<size_t>(i % copies)];
        bench.ops().linear(call);
      });
      const auto values = static_cast<double>(rows * (in + out));
      bench.add({name, cat(out, "x", in), rows, us, static_cast<double>(one) + 2 * values,
                 rows > 32 ? 2.0 * static_cast<double>(rows * in * out) : 0, 0});
    }
  }
}

/// A layer of 4-bit experts on the device.
struct Layer {
  Buffer codes, suh, svh;
  std::vector<Weight> gate, up, down;

  explicit Layer(Bench& bench) {
    const size_t one = static_cast<size_t>(kHidden * kInter) / 2;
    codes = bench.filled(one * 3 * kExperts);
    suh = bench.upload(std::vector<uint16_t>(kHidden, f32_to_f16(0.01F)));
    svh = bench.upload(std::vector<uint16_t>(kHidden, f32_to_f16(1.0F)));
    for (size_t e = 0; e < kExperts; ++e) {
      gate.push_back(expert(kInter, kHidden, (3 * e) * one));
      up.push_back(expert(kInter, kHidden, (3 * e + 1) * one));
      down.push_back(expert(kHidden, kInter, (3 * e + 2) * one));
    }
  }
  Weight expert(int64_t out, int64_t in, size_t at) const {
    Weight w;
    w.format = WeightFormat::exl3;
    w.out = out;
    w.in = in;
    w.bits = 4;
    w.codes = codes.view(Dtype::i16, {in / 16, out / 16, 64}, at);
    w.suh = suh.view(Dtype::f16, {in});
    w.svh = svh.view(Dtype::f16, {out});
    return w;
  }
};

/// `rows` rows of `k` experts each, all different in a row; `distinct` bounds the experts that are used at all.
std::vector<int32_t> routing(int64_t rows, int64_t k, int64_t distinct, std::mt19937& random) {
  std::vector<int32_t> pool(kExperts), out;
  std::iota(pool.begin(), pool.end(), 0);
  std::shuffle(pool.begin(), pool.end(), random);
  pool.resize(static_cast<size_t>(distinct));
  size_t next = 0;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<int32_t> mine;
    // First every expert once, then at random.
    while (static_cast<int64_t>(mine.size()) < k) {
      const int32_t e = next < pool.size() ? pool[next++] : pool[random() % pool.size()];
      if (std::find(mine.begin(), mine.end(), e) == mine.end()) mine.push_back(e);
    }
    std::sort(mine.begin(), mine.end());
    out.insert(out.end(), mine.begin(), mine.end());
  }
  return out;
}

void bench_moe(Bench& bench) {
  struct Case {
    int64_t rows, k, distinct;  // distinct 0: at random over all experts
  };
  if (!bench.wanted("moe")) return;
  const Layer layer(bench);
  std::mt19937 random(2);
  for (const auto& [rows, k, limit] : {Case{1, 8, 8},
                                       {2, 8, 0},
                                       {4, 8, 0},
                                       {8, 8, 0},
                                       {16, 8, 0},
                                       {32, 8, 0},
                                       {64, 8, 0},
                                       {5, 7, 35},
                                       {8, 8, 35},
                                       {8, 8, 21},
                                       {16, 8, 65},
                                       {256, 8, 0},
                                       {1024, 8, 0},
                                       {2048, 8, 0},
                                       {8192, 8, 0}}) {
    constexpr int kSets = 8;  // routings that take turns, so that experts are cold
    std::vector<Buffer> indices;
    double used = 0;
    for (int s = 0; s < kSets; ++s) {
      const std::vector<int32_t> ids = limit > 0 ? routing(rows, k, limit, random) : [&] {
        std::vector<int32_t> all;
        for (int64_t r = 0; r < rows; ++r) {
          const std::vector<int32_t> row = routing(1, k, kExperts, random);
          all.insert(all.end(), row.begin(), row.end());
        }
        return all;
      }();
      std::vector<int32_t> sorted = ids;
      std::sort(sorted.begin(), sorted.end());
      used += static_cast<double>(std::unique(sorted.begin(), sorted.end()) - sorted.begin()) / kSets;
      indices.push_back(bench.upload(ids));
    }
    const Buffer x = bench.filled(static_cast<size_t>(rows * kHidden) * 2);
    const Buffer weight = bench.upload(std::vector<float>(static_cast<size_t>(rows * k), 0.3F));
    const Buffer out = bench.ops().allocate(static_cast<size_t>(rows * kHidden) * 2, Place::device);
    const double us = bench.time(rows >= 256 ? 4 : 2 * kSets, [&](int i) {
      bench.ops().moe({.x = x.view(Dtype::bf16, {rows, kHidden}),
                       .index = indices[static_cast<size_t>(i % kSets)].view(Dtype::i32, {rows, k}),
                       .weight = weight.view(Dtype::f32, {rows, k}),
                       .gate = layer.gate,
                       .up = layer.up,
                       .down = layer.down,
                       .limit = 10,
                       .out = out.view(Dtype::bf16, {rows, kHidden}),
                       .window_rows = rows <= 64 ? static_cast<int>(rows) : 0});
    });
    const double weights = used * 3 * kHidden * kInter;
    bench.add({"moe", cat(std::lround(used), " experts, k ", k), rows, us, weights / 2,
               rows >= 256 ? 2.0 * static_cast<double>(rows * k * 3 * kHidden * kInter) : 0, weights});
  }
}

void write_json(const Bench& bench, std::ostream& out) {
  const Card& card = bench.card();
  out << "{\"card\": \"" << card.name << "\", \"sms\": " << card.sms << ", \"mhz\": " << card.mhz
      << ", \"copy_gbs\": " << card.copy_gbs << ", \"node_us\": " << card.node_us << ", \"results\": [";
  const char* separator = "\n";
  for (const Result& r : bench.results()) {
    out << separator << "{\"op\": \"" << r.op << "\", \"shape\": \"" << r.shape << "\", \"rows\": " << r.rows
        << ", \"us\": " << r.us << ", \"gbs\": " << r.bytes / r.us / 1e3 << ", \"tflops\": " << r.flops / r.us / 1e6
        << ", \"weights_per_sm_clk\": " << bench.per_clock(r) << "}";
    separator = ",\n";
  }
  out << "\n]}\n";
}

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (i + 1 == argc) throw Error(Code::usage, cat("bench_ops: '", word, "' needs a value"));
    const char* value = argv[++i];
    if (word == "--json")
      options.json = value;
    else if (word == "--only")
      options.only = value;
    else if (word == "--reps")
      options.reps = static_cast<int>(std::clamp<int64_t>(parse_int(value).value_or(1), 1, 10000));
    else
      throw Error(Code::usage, cat("bench_ops: unknown option '", word, "': --json FILE, --only WORD, --reps N"));
  }
  Bench bench(options);
  bench_linear(bench, WeightFormat::bf16, "linear");
  bench_linear(bench, WeightFormat::fp8_row, "linear_fp8");
  bench_linear(bench, WeightFormat::int4_g32, "linear_int4");
  bench_moe(bench);
  bench_step_ops(bench);
  bench_sampling(bench);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    write_json(bench, file);
    if (!file.flush()) throw Error(Code::unavailable, cat("bench_ops: cannot write ", options.json));
  }
  return 0;
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  try {
    return glm53::run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 1;
  }
}
