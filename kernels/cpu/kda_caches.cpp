#include "kernels/cpu/kda_caches.h"

#include <cstring>
#include <string>

#include "common/error.h"
#include "kernels/cpu/check.h"

namespace glm53::cpu {
namespace {

// Snapshots may be absent; then their shape does not matter.
void expect_pool(std::string_view op, std::string_view name, const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.empty()) return;
  expect(op, name, t, Dtype::f32, {shape.begin()[0], -1, -1, -1});
  for (size_t i = 1; i < shape.size(); ++i) {
    if (t.shape[i] == shape.begin()[i]) continue;
    throw Error(Code::internal,
                std::string(op) + ": dimension " + std::to_string(i) + " of " + std::string(name) + " is " +
                    std::to_string(t.shape[i]),
                "expected " + std::to_string(shape.begin()[i]));
  }
  expect_that(t.contiguous(), op, "a cache pool is not contiguous");
}

}  // namespace

KdaCaches::KdaCaches(const Caches& caches, int layer, std::string_view op)
    : heads(caches.geometry.kda_heads),
      dim(caches.geometry.head_dim),
      channels(caches.geometry.conv_channels),
      history(caches.geometry.conv_kernel - 1),
      columns(caches.geometry.conv_columns()),
      caches_(caches),
      layer_(layer),
      op_(op) {
  const CacheGeometry& g = caches.geometry;
  expect_that(layer >= 0 && layer < g.kda_layers, op, "layer is not one of the geometry's kda_layers");
  expect_that(heads > 0 && dim > 0 && history > 0 && channels == 3 * heads * dim, op,
              "cache geometry: conv_channels is not 3 * kda_heads * head_dim");
  const int64_t layers = g.kda_layers;
  expect_that(!caches.state.empty() && !caches.conv.empty() && !caches.records.empty(), op,
              "caches.state, conv or records is empty");
  // Tensors have four dimensions at most, so the matrix of a head is one.
  const auto check_state = [&](std::string_view name, const Tensor& t) {
    if (t.empty()) return;
    const bool fits = t.dtype == Dtype::f32 && t.contiguous() && t.rank >= 1 && t.dim(0) > 0 &&
                      t.elements() == t.dim(0) * layers * heads * dim * dim;
    expect_that(fits, op, std::string(name) + " is not f32 [ids][kda_layers][kda_heads][head_dim][head_dim]");
  };
  check_state("caches.state", caches.state);
  check_state("caches.snap_state", caches.snap_state);
  expect_pool(op, "caches.conv", caches.conv, {-1, layers, columns, channels});
  expect_pool(op, "caches.snap_conv", caches.snap_conv, {-1, layers, history, channels});
  expect_pool(op, "caches.records", caches.records, {-1, layers, g.max_window, g.record_width()});
}

float* KdaCaches::state(int64_t slot, int64_t head) const {
  return caches_.state.as<float>() + ((slot * caches_.geometry.kda_layers + layer_) * heads + head) * dim * dim;
}

float* KdaCaches::saved_state(int64_t snap, int64_t head) const {
  check_snap(caches_.snap_state, snap);
  return caches_.snap_state.as<float>() + ((snap * caches_.geometry.kda_layers + layer_) * heads + head) * dim * dim;
}

float* KdaCaches::conv(int64_t slot) const {
  return caches_.conv.as<float>() + (slot * caches_.geometry.kda_layers + layer_) * columns * channels;
}

float* KdaCaches::saved_conv(int64_t snap) const {
  check_snap(caches_.snap_conv, snap);
  return caches_.snap_conv.as<float>() + (snap * caches_.geometry.kda_layers + layer_) * history * channels;
}

float* KdaCaches::record(int64_t slot, int64_t row) const {
  const CacheGeometry& g = caches_.geometry;
  return caches_.records.as<float>() + ((slot * g.kda_layers + layer_) * g.max_window + row) * g.record_width();
}

void KdaCaches::check_snap(const Tensor& pool, int64_t snap) const {
  if (snap >= 0 && !pool.empty() && snap < pool.dim(0)) return;
  throw Error(Code::internal, std::string(op_) + ": snapshot " + std::to_string(snap) + " is outside a pool of " +
                                  std::to_string(pool.empty() ? 0 : pool.dim(0)));
}

void shift_history(const KdaCaches& caches, float* conv, int count, int64_t begin, int64_t end) {
  if (count == 0) return;
  for (int64_t j = 0; j < caches.history; ++j) {  // ascending: a column is read before it is overwritten
    std::memcpy(conv + j * caches.channels + begin, conv + (j + count) * caches.channels + begin,
                static_cast<size_t>(end - begin) * sizeof(float));
  }
}

}  // namespace glm53::cpu
