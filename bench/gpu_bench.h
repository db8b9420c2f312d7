// What the GPU benchmarks share: memory, timing and the report.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cuda_runtime_api.h>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/ops.h"

namespace glm53 {

inline constexpr size_t kCold = size_t{256} << 20;  // bytes of weights between two uses of the same ones

struct Options {
  std::string json, only;
  int reps = 21;
};

struct Result {
  std::string op, shape;
  int64_t rows;
  double us, bytes, flops, weights;  ///< weights: EXL3 weights decoded
};

struct Card {
  std::string name;
  int sms = 0, mhz = 0;
  double copy_gbs = 0, node_us = 0;
};

/// One operator and the memory it works on.
class Bench {
 public:
  explicit Bench(Options options) : options_(std::move(options)), ops_(make_cuda_ops(0, Dtype::bf16)) {
    cudaDeviceProp found{};
    require(cudaGetDeviceProperties(&found, 0), "device properties");
    card_.name = found.name;
    card_.sms = found.multiProcessorCount;
    int khz = 0;
    require(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "clock rate");
    card_.mhz = khz / 1000;
    noise();
    measure_card();
  }

  Ops& ops() { return *ops_; }
  const Card& card() const { return card_; }
  const std::vector<Result>& results() const { return results_; }
  bool wanted(const std::string& op) const { return op.find(options_.only) != std::string::npos; }

  /// Device memory full of bit patterns that are small finite bf16 values.
  Buffer filled(size_t bytes) {
    Buffer memory = ops_->allocate(bytes, Place::device);
    for (size_t done = 0; done < bytes; done += noise_.bytes()) {
      const auto n = static_cast<int64_t>(std::min(bytes - done, noise_.bytes()));
      ops_->copy(memory.view(Dtype::u8, {n}, done), noise_.view(Dtype::u8, {n}));
    }
    ops_->synchronize();
    return memory;
  }
  template <class T>
  Buffer upload(const std::vector<T>& values) {
    Buffer memory = ops_->allocate(values.size() * sizeof(T), Place::device);
    const auto n = static_cast<int64_t>(values.size() * sizeof(T));
    ops_->copy(memory.view(Dtype::u8, {n}), Tensor::of(const_cast<T*>(values.data()), Dtype::u8, {n}));
    ops_->synchronize();
    return memory;
  }

  /// Median time of one of `calls` calls in a graph.
  double time(int calls, const std::function<void(int)>& call) {
    call(0);  // scratch grows outside of the graph
    ops_->synchronize();
    const auto graph = ops_->capture([&] {
      for (int i = 0; i < calls; ++i) call(i);
    });
    std::vector<double> us;
    for (int rep = 0; rep < options_.reps + 3; ++rep) {
      const auto begin = std::chrono::steady_clock::now();
      graph->launch();
      ops_->synchronize();
      if (rep >= 3)
        us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() /
                     calls);
    }
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    return us[us.size() / 2];
  }
  void add(Result r) {
    std::printf("%-14s %-16s %6ld %10.2f us", r.op.c_str(), r.shape.c_str(), static_cast<long>(r.rows), r.us);
    if (r.bytes > 0) {
      const double gbs = r.bytes / r.us / 1e3;
      std::printf("  %8.1f MB %8.1f GB/s %5.2f of copy", r.bytes / 1e6, gbs, gbs / card_.copy_gbs);
    }
    if (r.flops > 0) std::printf("  %8.1f TFLOP/s", r.flops / r.us / 1e6);
    if (r.weights > 0) std::printf("  %5.2f weights/SM/clk", per_clock(r));
    std::printf("\n");
    std::fflush(stdout);
    results_.push_back(std::move(r));
  }
  double per_clock(const Result& r) const { return r.weights / (r.us * card_.mhz * card_.sms); }

 private:
  static void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw Error(Code::device, cat(what, ": ", cudaGetErrorString(status)));
  }
  void noise() {
    std::mt19937 random(1);
    std::vector<uint16_t> words(size_t{8} << 20);
    for (uint16_t& w : words) w = static_cast<uint16_t>(0x3c00U | (random() & 0x80ffU));
    noise_ = upload(words);
  }
  void measure_card() {
    constexpr int64_t kBytes = int64_t{1} << 30;
    const Buffer from = filled(kBytes), to = ops_->allocate(kBytes, Place::device);
    // Not in a graph, where a copy is left to the slower copy engines.
    double best = 1e30;
    for (int rep = 0; rep < 20; ++rep) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 4; ++i) ops_->copy(to.view(Dtype::u8, {kBytes}), from.view(Dtype::u8, {kBytes}));
      ops_->synchronize();
      best = std::min(best,
                      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / 4);
    }
    card_.copy_gbs = 2.0 * static_cast<double>(kBytes) / best / 1e3;
    card_.node_us = time(200, [&](int) { ops_->zero(to.view(Dtype::u8, {4})); });
    std::printf("%s, %d SMs, %d MHz; copy %.0f GB/s (read and written); smallest node %.2f us\n", card_.name.c_str(),
                card_.sms, card_.mhz, card_.copy_gbs, card_.node_us);
  }

  Options options_;
  std::unique_ptr<Ops> ops_;
  Card card_;
  Buffer noise_;
  std::vector<Result> results_;
};

}  // namespace glm53
