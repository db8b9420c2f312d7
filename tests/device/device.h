// What tests on a GPU share: weights and rows on the device, results back on the host as f32.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "kernels/half.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/weights.h"

namespace glm53::test {

/// ‖got − want‖ / ‖want‖.
inline double distance(std::span<const float> got, std::span<const double> want) {
  double apart = 0, size = 1e-300;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    apart += d * d;
    size += want[i] * want[i];
  }
  return std::sqrt(apart / size);
}
inline double distance(std::span<const float> got, std::span<const float> want) {
  return distance(got, widen(want));
}

/// Owns a CUDA backend with bf16 activations and everything put on its device. Throws where there is no GPU.
class Device {
 public:
  Device() : ops_(make_cuda_ops(0, Dtype::bf16)) {}
  Ops& ops() { return *ops_; }

  Tensor put(const Tensor& host) {
    kept_.push_back(ops_->allocate(std::max<size_t>(host.bytes(), 1), Place::device));
    const Tensor to =
        Tensor::of(kept_.back().data(), host.dtype, std::span(host.shape.data(), host.rank), Place::device);
    ops_->copy(to, host);
    ops_->synchronize();
    return to;
  }
  Weight put(Weight w) {
    for (Tensor* part : {&w.codes, &w.scales, &w.suh, &w.svh}) {
      if (!part->empty()) *part = put(*part);
    }
    return w;
  }
  Tensor floats(Floats v, std::initializer_list<int64_t> shape) { return put(tensor(v, shape)); }
  Tensor ints(Ints v, std::initializer_list<int64_t> shape) { return put(tensor(v, shape)); }
  /// The values rounded to bf16; `v` becomes what the device has.
  Tensor halves(Floats& v, std::initializer_list<int64_t> shape) {
    std::vector<uint16_t> words(v.size());
    for (size_t i = 0; i < v.size(); ++i) {
      words[i] = f32_to_bf16(v[i]);
      v[i] = bf16_to_f32(words[i]);
    }
    return put(Tensor::of(words.data(), Dtype::bf16, shape));
  }
  /// Rows filled with NaN, so that an output nobody wrote shows.
  Tensor poisoned(Dtype dtype, std::initializer_list<int64_t> shape) {
    const int64_t n = Tensor::of(nullptr, dtype, shape).elements();
    Floats nan(at(n), NAN);
    return dtype == Dtype::bf16 ? halves(nan, shape) : floats(std::move(nan), shape);
  }
  Floats fetch(const Tensor& t) {
    Floats out(at(t.elements()));
    if (t.dtype == Dtype::f32) {
      ops_->copy(tensor(out, {t.elements()}), Tensor::of(t.data, t.dtype, {t.elements()}, t.place));
      ops_->synchronize();
      return out;
    }
    std::vector<uint16_t> words(out.size());
    ops_->copy(Tensor::of(words.data(), Dtype::bf16, {t.elements()}),
               Tensor::of(t.data, t.dtype, {t.elements()}, t.place));
    ops_->synchronize();
    for (size_t i = 0; i < out.size(); ++i) out[i] = bf16_to_f32(words[i]);
    return out;
  }

 private:
  std::unique_ptr<Ops> ops_;
  std::vector<Buffer> kept_;
};

}  // namespace glm53::test
