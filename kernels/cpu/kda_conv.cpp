// Short causal convolution of KDA with its history (spec model §4, runtime §3.1, §3.3).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/cpu/batch_rows.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/kda_caches.h"
#include "kernels/cpu/kda_rows.h"

namespace glm53::cpu {
namespace {

constexpr std::string_view kOp = "kda_conv";
constexpr int64_t kSlice = 256;  // channels of one task

// acc[c] += w[c] · x[c]
GLM53_CLONES void multiply_add(const float* w, const float* x, float* acc, int64_t n) {
  for (int64_t c = 0; c < n; ++c) acc[c] += w[c] * x[c];
}

// One sequence's channels [begin, end).
class Slice {
 public:
  Slice(const KdaConvArgs& args, const KdaCaches& caches, const SeqRows& seq, int64_t begin, int64_t end,
        float* scratch)
      : args_(args), caches_(caches), seq_(seq), begin_(begin), n_(end - begin), weight_(scratch) {
    for (int64_t tap = 0; tap <= caches.history; ++tap) {
      for (int64_t c = 0; c < n_; ++c) {
        weight_[tap * n_ + c] = value_at(*args.weight, (begin + c) * (caches.history + 1) + tap);
      }
    }
  }

  void run() {
    float* conv = caches_.conv(seq_.slot);
    shift_history(caches_, conv, seq_.replay, begin_, begin_ + n_);
    for (int i = 0; i < seq_.rows(); ++i) compute(conv, i);
    if (seq_.window) {
      for (int i = 0; i < seq_.rows(); ++i) copy(conv + (caches_.history + i) * caches_.channels, raw(i));
      return;
    }
    for (size_t e = 0; e < seq_.export_pos.size(); ++e) {
      if (seq_.export_pos[e] < 0) continue;
      history_after(conv, seq_.export_pos[e] - seq_.position, caches_.saved_conv(seq_.export_snap[e]));
    }
    history_after(conv, seq_.rows(), conv);
  }

 private:
  const float* raw(int64_t i) const { return args_.raw.as<const float>() + (seq_.begin + i) * args_.raw.stride[0]; }
  // Raw column of row i, or of the history for i < 0.
  const float* column(const float* conv, int64_t i) const {
    return i < 0 ? conv + (caches_.history + i) * caches_.channels : raw(i);
  }
  void copy(float* to, const float* from) const {
    std::memmove(to + begin_, from + begin_, static_cast<size_t>(n_) * sizeof(float));
  }

  void compute(const float* conv, int64_t i) const {
    float* out = args_.out.as<float>() + (seq_.begin + i) * args_.out.stride[0] + begin_;
    std::fill_n(out, n_, 0.0F);
    for (int64_t tap = 0; tap <= caches_.history; ++tap) {
      multiply_add(weight_ + tap * n_, column(conv, i + tap - caches_.history) + begin_, out, n_);
    }
    for (int64_t c = 0; c < n_; ++c) out[c] *= sigmoid(out[c]);
  }

  // The history as it is after `tokens` rows; `to` may be the history itself.
  void history_after(const float* conv, int64_t tokens, float* to) const {
    for (int64_t j = 0; j < caches_.history; ++j) {
      copy(to + j * caches_.channels, column(conv, tokens + j - caches_.history));
    }
  }

  const KdaConvArgs& args_;
  const KdaCaches& caches_;
  const SeqRows& seq_;
  int64_t begin_, n_;
  float* weight_;  // [tap][n]
};

}  // namespace

void CpuOps::kda_conv(const KdaConvArgs& args) {
  const int64_t rows = args.raw.dim(0);
  const KdaCaches caches(*args.caches, args.layer, kOp);
  const BatchRows batch(*args.batch, *args.caches, rows, kOp);
  expect(kOp, "raw", args.raw, Dtype::f32, {rows, caches.channels});
  expect(kOp, "out", args.out, Dtype::f32, {rows, caches.channels});
  expect_plain(kOp, "weight", *args.weight, caches.channels, caches.history + 1);

  const int64_t slices = (caches.channels + kSlice - 1) / kSlice;
  const auto body = [&](int worker, int64_t begin, int64_t end) {
    float* scratch = worker_scratch(worker).get<float>(static_cast<size_t>((caches.history + 1) * kSlice));
    for (int64_t task = begin; task < end; ++task) {
      const SeqRows seq = batch.at(task / slices);
      const int64_t first = task % slices * kSlice, last = std::min(first + kSlice, caches.channels);
      if (seq.slot >= 0) Slice(args, caches, seq, first, last, scratch).run();
    }
  };
  pool().parallel_for_worker(batch.seqs() * slices, 1, body);
  for (int64_t seq = 0; seq < batch.seqs(); ++seq) {
    const SeqRows s = batch.at(seq);
    if (s.slot < 0) zero_rows(args.out, s.begin, s.end);
  }
  zero_rows(args.out, batch.rows(), rows);
}

}  // namespace glm53::cpu
