// Pools, batches and random inputs for the tests of the operators that work on caches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include "common/error.h"
#include "kernels/ops.h"

namespace glm53::test {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;

inline size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float normal() { return normal_(engine_); }
  int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  Floats normals(int64_t n, float scale = 1.0F, float mean = 0.0F) {
    Floats v(at(n));
    for (float& x : v) x = mean + scale * normal();
    return v;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_{0.0F, 1.0F};
};

inline Tensor tensor(Floats& v, std::initializer_list<int64_t> shape) {
  return Tensor::of(v.data(), Dtype::f32, shape);
}
inline Tensor tensor(Ints& v, std::initializer_list<int64_t> shape) {
  return Tensor::of(v.data(), Dtype::i32, shape);
}
inline Weight plain(Floats& v, int64_t out, int64_t in) {
  Weight w;
  w.format = WeightFormat::f32;
  w.out = out;
  w.in = in;
  w.codes = tensor(v, {out, in});
  return w;
}

/// Largest difference relative to the largest reference value; infinite when anything is not finite.
inline double relative_error(std::span<const float> got, std::span<const double> want) {
  REQUIRE(got.size() == want.size());
  double scale = 1e-30, worst = 0;
  for (const double w : want) scale = std::max(scale, std::fabs(w));
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = std::fabs(static_cast<double>(got[i]) - want[i]);
    if (!std::isfinite(d)) return INFINITY;
    worst = std::max(worst, d);
  }
  return worst / scale;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}
inline bool all_zero(std::span<const float> v) {
  return std::all_of(v.begin(), v.end(), [](float x) { return x == 0.0F; });
}

/// All pools of one rank, filled with NaN so that a read of something never written shows.
struct World {
  World(const CacheGeometry& g, int slot_count, int snap_count, int block_count) : slots(slot_count) {
    caches.geometry = g;
    caches.layout = block_layout(g);
    const int64_t dim2 = int64_t{g.head_dim} * g.head_dim;
    if (g.kda_layers > 0) {
      caches.state = pool(Dtype::f32, {slot_count, g.kda_layers, g.kda_heads, dim2});
      caches.conv = pool(Dtype::f32, {slot_count, g.kda_layers, g.conv_columns(), g.conv_channels});
      caches.records = pool(Dtype::f32, {slot_count, g.kda_layers, g.max_window, g.record_width()});
      if (snap_count > 0) {
        caches.snap_state = pool(Dtype::f32, {snap_count, g.kda_layers, g.kda_heads, dim2});
        caches.snap_conv = pool(Dtype::f32, {snap_count, g.kda_layers, g.conv_kernel - 1, g.conv_channels});
      }
    }
    if (g.mla_layers > 0) {
      caches.ring = pool(Dtype::f32, {slot_count, g.mla_layers, g.ring(), 2 * g.index_dim});
      if (snap_count > 0) caches.snap_ring = pool(Dtype::f32, {snap_count, g.mla_layers, g.ring(), 2 * g.index_dim});
      caches.blocks = pool(Dtype::u8, {block_count, static_cast<int64_t>(caches.layout.block_bytes)});
    }
  }
  Tensor pool(Dtype dtype, std::initializer_list<int64_t> shape) {
    size_t bytes = size_of(dtype);
    for (const int64_t n : shape) bytes *= at(n);
    memory.push_back(host_buffer(bytes));
    std::memset(memory.back().data(), 0xff, bytes);
    return memory.back().view(dtype, shape);
  }
  void reset(Ops& ops) {
    for (int32_t s = 0; s < slots; ++s) ops.slot_reset(caches, static_cast<SlotId>(s));
  }
  std::span<float> state(int slot, int layer, int head) {
    const CacheGeometry& g = caches.geometry;
    const size_t n = at(g.head_dim) * at(g.head_dim);
    return {caches.state.as<float>() + at((int64_t{slot} * g.kda_layers + layer) * g.kda_heads + head) * n, n};
  }
  std::span<float> saved_state(int snap, int layer, int head) {
    const CacheGeometry& g = caches.geometry;
    const size_t n = at(g.head_dim) * at(g.head_dim);
    return {caches.snap_state.as<float>() + at((int64_t{snap} * g.kda_layers + layer) * g.kda_heads + head) * n, n};
  }
  std::span<float> history(int slot, int layer) {
    const CacheGeometry& g = caches.geometry;
    const int64_t column = g.conv_channels;
    return {caches.conv.as<float>() + (int64_t{slot} * g.kda_layers + layer) * g.conv_columns() * column,
            at((g.conv_kernel - 1) * column)};
  }
  std::span<float> saved_history(int snap, int layer) {
    const CacheGeometry& g = caches.geometry;
    const int64_t n = int64_t{g.conv_kernel - 1} * g.conv_channels;
    return {caches.snap_conv.as<float>() + (int64_t{snap} * g.kda_layers + layer) * n, at(n)};
  }
  /// Key and gate of one token.
  std::span<float> ring(int slot, int layer, int position) {
    const CacheGeometry& g = caches.geometry;
    const int64_t n = 2 * g.index_dim;
    return {caches.ring.as<float>() + ((int64_t{slot} * g.mla_layers + layer) * g.ring() + position % g.ring()) * n,
            at(n)};
  }
  std::span<float> block_floats(int block) {
    const size_t n = caches.layout.block_bytes / sizeof(float);
    return {reinterpret_cast<float*>(static_cast<std::byte*>(caches.blocks.data) + at(block) * n * sizeof(float)), n};
  }

  Caches caches;
  int slots;
  std::vector<Buffer> memory;
};

/// One sequence of a step.
struct Seq {
  int slot = 0, position = 0, rows = 1, replay = 0;
  Ints table{};  ///< blocks; missing entries are null
  Ints export_pos{}, export_snap{};
};

/// Owns the arrays of a Batch. Window sequences first; `extra` padding rows and sequences at the end.
struct Step {
  Step(const std::vector<Seq>& windows, const std::vector<Seq>& chunks, int extra_rows = 0, int extra_seqs = 0) {
    std::vector<Seq> all = windows;
    all.insert(all.end(), chunks.begin(), chunks.end());
    size_t blocks = 1;
    for (const Seq& s : all) blocks = std::max(blocks, s.table.size());
    begin.push_back(0);
    for (size_t i = 0; i < all.size(); ++i) add(all[i], static_cast<int32_t>(i), blocks);
    for (const Seq& s : windows) batch.window_rows += s.rows;
    batch.rows = begin.back();
    batch.seqs = static_cast<int>(all.size());
    batch.window_seqs = static_cast<int>(windows.size());
    rows = batch.rows + extra_rows;
    pad(at(rows), all.size() + at(extra_seqs), blocks);
  }
  void add(const Seq& s, int32_t index, size_t blocks) {
    for (int i = 0; i < s.rows; ++i) {
      position.push_back(s.position + i);
      row_seq.push_back(index);
    }
    begin.push_back(begin.back() + s.rows);
    slot.push_back(s.slot);
    replay.push_back(s.replay);
    committed.push_back(s.position - s.replay);
    for (size_t b = 0; b < blocks; ++b) table.push_back(b < s.table.size() ? s.table[b] : 0);
    for (size_t e = 0; e < 2; ++e) {
      export_pos.push_back(e < s.export_pos.size() ? s.export_pos[e] : -1);
      export_snap.push_back(e < s.export_snap.size() ? s.export_snap[e] : -1);
    }
  }
  void pad(size_t capacity, size_t seqs, size_t blocks) {
    // Padding holds what would hurt if anybody used it.
    position.resize(capacity, 1 << 30);
    row_seq.resize(capacity, 1 << 30);
    token.resize(capacity, -1);
    begin.resize(seqs + 1, begin.back());
    slot.resize(seqs, -1);
    replay.resize(seqs, 1 << 30);
    committed.resize(seqs, 0);
    table.resize(seqs * blocks, 1 << 30);
    export_pos.resize(seqs * 2, -1);
    export_snap.resize(seqs * 2, -1);
    const auto r = static_cast<int64_t>(capacity), s = static_cast<int64_t>(seqs);
    batch.token = tensor(token, {r});
    batch.position = tensor(position, {r});
    batch.row_seq = tensor(row_seq, {r});
    batch.row_begin = tensor(begin, {s + 1});
    batch.slot = tensor(slot, {s});
    batch.replay = tensor(replay, {s});
    batch.committed = tensor(committed, {s});
    batch.block_table = tensor(table, {s, static_cast<int64_t>(blocks)});
    batch.export_pos = tensor(export_pos, {s, 2});
    batch.export_snap = tensor(export_snap, {s, 2});
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  Batch batch;
  int rows = 0;  ///< with padding
  Ints token, position, row_seq, begin, slot, replay, committed, table, export_pos, export_snap;
};

}  // namespace glm53::test
