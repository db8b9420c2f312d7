// Latents and pooled keys in the cache formats (spec runtime §1.2–1.4), as kernels read and write them.
#pragma once

#include <cuda_fp8.h>

#include "kernels/cuda/device.cuh"

namespace glm53::cuda {

constexpr int kGroup = 128;  // values that share a scale; also the width of the rotation

__device__ inline bool eight_bit(const LatentView& c) {
  return c.format == static_cast<int>(KvFormat::fp8_c528) || c.format == static_cast<int>(KvFormat::int8_c528);
}
__device__ inline int element_bytes(const LatentView& c) {
  return eight_bit(c) ? 1 : c.format == static_cast<int>(KvFormat::bf16) ? 2 : 4;
}
__device__ inline float largest_code(const LatentView& c) {
  return c.format == static_cast<int>(KvFormat::fp8_c528) ? 448.0F : 127.0F;
}

__device__ inline uint8_t encode(const LatentView& c, float x) {
  if (c.format == static_cast<int>(KvFormat::fp8_c528)) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  if (isnan(x)) return 0;
  return static_cast<uint8_t>(static_cast<int8_t>(fminf(fmaxf(rintf(x), -127.0F), 127.0F)));
}
__device__ inline float decode(const LatentView& c, uint8_t code) {
  if (c.format == static_cast<int>(KvFormat::int8_c528)) return static_cast<float>(static_cast<int8_t>(code));
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

/// Element i of a row of codes with its scale (8-bit) or none.
__device__ inline float value_at(const LatentView& c, const uint8_t* codes, int64_t i, float scale) {
  if (eight_bit(c)) return decode(c, codes[i]) * scale;
  return load(codes, c.format == static_cast<int>(KvFormat::bf16), i);
}

__device__ inline uint8_t* latent_row(const LatentView& c, int64_t block, int64_t token) {
  return c.base + block * c.block_bytes + c.codes + token * c.latent * element_bytes(c);
}
__device__ inline float* latent_scales(const LatentView& c, int64_t block, int64_t token) {
  return reinterpret_cast<float*>(c.base + block * c.block_bytes + c.scales) + token * (c.latent / kGroup);
}
__device__ inline float latent_value(const LatentView& c, int64_t block, int64_t token, int64_t i) {
  const float scale = eight_bit(c) ? latent_scales(c, block, token)[i / kGroup] : 1.0F;
  return value_at(c, latent_row(c, block, token), i, scale);
}
__device__ inline uint8_t* pool_row(const LatentView& c, int64_t block, int64_t pool) {
  return c.base + block * c.block_bytes + c.pool_keys + pool * c.index_dim * element_bytes(c);
}
__device__ inline float* pool_scale(const LatentView& c, int64_t block, int64_t pool) {
  return reinterpret_cast<float*>(c.base + block * c.block_bytes + c.pool_scales) + pool;
}

/// Largest magnitude of 128 shared values, at most 3.4e38 (infinity saturates there: code times scale stays finite);
/// *nan tells whether one is NaN. One thread works it out; the values are few.
__device__ inline float range_of(const float* v, bool* nan) {
  float largest = 0;
  *nan = false;
  for (int i = 0; i < kGroup; ++i) {
    const float a = fabsf(v[i]);
    *nan = *nan || isnan(a);
    if (a > largest) largest = a;
  }
  return fminf(largest, 3.4e38F);
}

}  // namespace glm53::cuda
