#include "kernels/cpu/latent_cache.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "common/error.h"
#include "kernels/half.h"

namespace glm53::cpu {
namespace {

constexpr int kGroup = 128;  // values that share a scale; also the width of the rotation
constexpr float kE4m3Max = 448.0F;
constexpr float kLargest = 3.4e38F;  // infinity saturates here: code times scale stays finite
constexpr float kInt8Max = 127.0F;
constexpr float kPoolFloor = 1e-4F;  // smallest amax of a pooled key, as public engines have it

[[noreturn]] void fail(std::string_view op, const std::string& what) {
  throw Error(Code::internal, std::string(op) + ": " + what);
}

const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (size_t i = 0; i < t.size(); ++i) t[i] = e4m3_to_f32(static_cast<uint8_t>(i));
    return t;
  }();
  return table;
}

struct Range {
  float amax = 0;  ///< largest magnitude, at most kLargest
  bool nan = false;
};

Range range_of(const float* x, int n) {
  Range r;
  for (int i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    r.nan = r.nan || std::isnan(a);
    if (a > r.amax) r.amax = a;  // false for NaN
  }
  r.amax = std::min(r.amax, kLargest);
  return r;
}

uint8_t encode(KvFormat format, float x) {
  if (format == KvFormat::fp8_c528) return f32_to_e4m3(x);
  if (std::isnan(x)) return 0;
  const float code = std::clamp(std::nearbyint(x), -kInt8Max, kInt8Max);
  return static_cast<uint8_t>(static_cast<int8_t>(code));
}

float largest_code(KvFormat format) {
  return format == KvFormat::fp8_c528 ? kE4m3Max : kInt8Max;
}

void encode_codes(KvFormat format, const float* x, int n, float scale, std::byte* codes) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<std::byte>(encode(format, x[i] / scale));
}

void decode_codes(KvFormat format, const std::byte* codes, int n, float scale, float* y) {
  if (format == KvFormat::fp8_c528) {
    const auto& value = e4m3_values();
    for (int i = 0; i < n; ++i) y[i] = value[static_cast<size_t>(codes[i])] * scale;
  } else {
    for (int i = 0; i < n; ++i) y[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
  }
}

void store_plain(KvFormat format, const float* x, int n, std::byte* to) {
  if (format == KvFormat::f32) {
    std::memcpy(to, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (int i = 0; i < n; ++i) out[i] = f32_to_bf16(x[i]);
}

void load_plain(KvFormat format, const std::byte* from, int n, float* y) {
  if (format == KvFormat::f32) {
    std::memcpy(y, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* in = reinterpret_cast<const uint16_t*>(from);
  for (int i = 0; i < n; ++i) y[i] = bf16_to_f32(in[i]);
}

// Smallest power of two that is at least x; x is positive and normal.
float power_of_two_above(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);  // x = mantissa · 2^exponent, mantissa in [0.5, 1)
  return std::ldexp(1.0F, mantissa > 0.5F ? exponent : exponent - 1);
}

}  // namespace

LatentCache::LatentCache(const Caches& caches, int layer, std::string_view op)
    : layout_(caches.layout),
      format_(caches.geometry.format),
      latent_(caches.geometry.latent),
      index_dim_(caches.geometry.index_dim) {
  if (layer < 0 || layer >= caches.geometry.mla_layers) {
    fail(op, "layer " + std::to_string(layer) + " of " + std::to_string(caches.geometry.mla_layers) + " MLA layers");
  }
  const Tensor& t = caches.blocks;
  if (t.rank != 2 || size_of(t.dtype) != 1 || t.dim(1) != static_cast<int64_t>(layout_.block_bytes) ||
      !t.contiguous()) {
    fail(op, "caches.blocks is not u8 [blocks][" + std::to_string(layout_.block_bytes) + "]");
  }
  blocks_ = t.dim(0);
  base_ = static_cast<std::byte*>(t.data) + static_cast<size_t>(layer) * layout_.layer_bytes;
}

std::byte* LatentCache::part(BlockId block, size_t offset) const {
  return base_ + static_cast<size_t>(block) * layout_.block_bytes + offset;
}

void LatentCache::write_latent(BlockId block, int token, const float* x) const {
  const auto row = static_cast<size_t>(token), width = static_cast<size_t>(latent_);
  std::byte* codes = part(block, layout_.codes + row * width * size_of(layout_.element));
  if (!rotated()) return store_plain(format_, x, latent_, codes);
  const int groups = latent_ / kGroup;
  auto* scales = reinterpret_cast<float*>(part(block, layout_.scales)) + row * static_cast<size_t>(groups);
  for (int g = 0; g < groups; ++g) {
    const float* from = x + g * kGroup;
    const Range range = range_of(from, kGroup);
    const float scale = std::max(range.amax / largest_code(format_), FLT_MIN);
    encode_codes(format_, from, kGroup, scale, codes + g * kGroup);
    // int8 has no NaN of its own; losing one silently would hide a fault upstream.
    scales[g] = range.nan && format_ == KvFormat::int8_c528 ? std::numeric_limits<float>::quiet_NaN() : scale;
  }
}

void LatentCache::read_latent(BlockId block, int token, float* y) const {
  const auto row = static_cast<size_t>(token), width = static_cast<size_t>(latent_);
  const std::byte* codes = part(block, layout_.codes + row * width * size_of(layout_.element));
  if (!rotated()) return load_plain(format_, codes, latent_, y);
  const int groups = latent_ / kGroup;
  const auto* scales = reinterpret_cast<const float*>(part(block, layout_.scales)) + row * static_cast<size_t>(groups);
  for (int g = 0; g < groups; ++g) decode_codes(format_, codes + g * kGroup, kGroup, scales[g], y + g * kGroup);
}

const float* LatentCache::latent_of(BlockId block, int token, float* y) const {
  if (format_ == KvFormat::f32) {
    const auto row = static_cast<size_t>(token) * static_cast<size_t>(latent_);
    return reinterpret_cast<const float*>(part(block, layout_.codes)) + row;
  }
  read_latent(block, token, y);
  return y;
}

void LatentCache::write_pool_key(BlockId block, int pool, const float* x) const {
  const auto row = static_cast<size_t>(pool), width = static_cast<size_t>(index_dim_);
  std::byte* codes = part(block, layout_.pool_keys + row * width * size_of(layout_.element));
  if (!rotated()) return store_plain(format_, x, index_dim_, codes);
  std::array<float, kGroup> r{};
  for (size_t i = 0; i < r.size(); ++i) r[i] = bf16_to_f32(f32_to_bf16(x[i]));
  hadamard128(r.data(), kGroup);
  for (float& v : r) v = bf16_to_f32(f32_to_bf16(v));
  const Range range = range_of(r.data(), kGroup);
  const float scale = power_of_two_above(std::max(range.amax, kPoolFloor) / largest_code(format_));
  encode_codes(format_, r.data(), kGroup, scale, codes);
  reinterpret_cast<float*>(part(block, layout_.pool_scales))[row] =
      range.nan && format_ == KvFormat::int8_c528 ? std::numeric_limits<float>::quiet_NaN() : scale;
}

void LatentCache::read_pool_key(BlockId block, int pool, float* y) const {
  const auto row = static_cast<size_t>(pool), width = static_cast<size_t>(index_dim_);
  const std::byte* codes = part(block, layout_.pool_keys + row * width * size_of(layout_.element));
  if (!rotated()) return load_plain(format_, codes, index_dim_, y);
  decode_codes(format_, codes, index_dim_, reinterpret_cast<const float*>(part(block, layout_.pool_scales))[row], y);
}

BlockId block_at(const Batch& batch, const Caches& caches, int64_t seq, int64_t position, std::string_view op) {
  const Tensor& table = batch.block_table;
  const int64_t index = position / kBlockTokens;
  if (position < 0 || index >= table.dim(1)) {
    fail(op, "position " + std::to_string(position) + " of sequence " + std::to_string(seq) +
                 " lies outside a block table of " + std::to_string(table.dim(1)) + " blocks");
  }
  const int32_t block = table.as<const int32_t>()[seq * table.stride[0] + index];
  if (block < 0 || block >= caches.blocks.dim(0)) {
    fail(op, "block " + std::to_string(block) + " at position " + std::to_string(position) + " of sequence " +
                 std::to_string(seq) + " is outside a pool of " + std::to_string(caches.blocks.dim(0)));
  }
  return static_cast<BlockId>(block);
}

void hadamard128(float* x, int n) {
  constexpr float kScale = 0.08838834764831845F;  // 128^-0.5
  for (float* v = x; v < x + n; v += kGroup) {
    for (int half = 1; half < kGroup; half *= 2) {
      for (int i = 0; i < kGroup; i += 2 * half) {
        for (int j = i; j < i + half; ++j) {
          const float a = v[j], b = v[j + half];
          v[j] = a + b;
          v[j + half] = a - b;
        }
      }
    }
    for (int i = 0; i < kGroup; ++i) v[i] *= kScale;
  }
}

}  // namespace glm53::cpu
