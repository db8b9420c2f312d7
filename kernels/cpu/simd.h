// Eight f32 or u32 lanes, whatever the machine: one 32-byte register with AVX2, two 16-byte registers elsewhere (SSE2,
// NEON).
//
// Compiled once per instruction set, each time in its own namespace: define GLM53_SIMD to the name of that namespace
// before including. Nothing outside that namespace may be inline in such a file, or the linker could keep a copy that
// an older machine cannot run.
#pragma once

#ifndef GLM53_SIMD
#error "define GLM53_SIMD to the name of the variant"
#endif

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

namespace glm53::cpu::GLM53_SIMD {

#if defined(__AVX2__)
#define GLM53_LANES 8
#else
#define GLM53_LANES 4
#endif
using FloatPart = float __attribute__((vector_size(4 * GLM53_LANES)));
using UintPart = uint32_t __attribute__((vector_size(4 * GLM53_LANES)));
using HalfPart = uint16_t __attribute__((vector_size(2 * GLM53_LANES)));
inline constexpr int kLanes = GLM53_LANES;
#undef GLM53_LANES

template <class V, class T>
inline V load_part(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

/// a·b + c: one rounding where the machine has it (every machine but x86-64 without FMA).
inline FloatPart fma_part(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

inline FloatPart widen_bf16(HalfPart h) {
  UintPart u = __builtin_convertvector(h, UintPart) << 16;
  FloatPart f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

/// Applies f to each part of the arguments; the result has the same layout.
#if defined(__AVX2__)
struct F8 {
  FloatPart a;
};
struct U8 {
  UintPart a;
};
template <class R, class F, class... V>
inline R each(F f, V... v) {
  return R{f(v.a...)};
}
#else
struct F8 {
  FloatPart a, b;
};
struct U8 {
  UintPart a, b;
};
template <class R, class F, class... V>
inline R each(F f, V... v) {
  return R{f(v.a...), f(v.b...)};
}
#endif

inline F8 zero() {
  return F8{};
}
inline F8 broadcast(float x) {
  return each<F8>([x](FloatPart z) { return x - z; }, zero());  // x − 0 is x, the sign of zero included
}
inline F8 load(const float* p) {
#if defined(__AVX2__)
  return {load_part<FloatPart>(p)};
#else
  return {load_part<FloatPart>(p), load_part<FloatPart>(p + kLanes)};
#endif
}
inline F8 load(const uint16_t* bf16) {
#if defined(__AVX2__)
  return {widen_bf16(load_part<HalfPart>(bf16))};
#else
  return {widen_bf16(load_part<HalfPart>(bf16)), widen_bf16(load_part<HalfPart>(bf16 + kLanes))};
#endif
}
inline void store(float* p, F8 v) {
  std::memcpy(p, &v, sizeof v);
}
/// The first n < 8 values, then zeros.
template <class T>
inline F8 load_head(const T* p, int64_t n) {
  T full[8] = {};
  std::memcpy(full, p, static_cast<size_t>(n) * sizeof(T));
  return load(full);
}

inline F8 fma(F8 x, F8 y, F8 z) {
  return each<F8>(fma_part, x, y, z);
}
inline F8 operator+(F8 x, F8 y) {
  return each<F8>([](FloatPart p, FloatPart q) { return p + q; }, x, y);
}
inline F8 operator-(F8 x, F8 y) {
  return each<F8>([](FloatPart p, FloatPart q) { return p - q; }, x, y);
}
inline F8 operator*(F8 x, F8 y) {
  return each<F8>([](FloatPart p, FloatPart q) { return p * q; }, x, y);
}
/// Sum of the lanes, always in this order: halves, quarters, pair.
inline float sum(F8 v) {
  float l[8];
  store(l, v);
  const float a = l[0] + l[4], b = l[1] + l[5], c = l[2] + l[6], d = l[3] + l[7];
  return (a + c) + (b + d);
}

/// Sum and difference of the lanes that `Distance` tells apart, in their places: the lower gets the sum.
template <int Distance>
inline FloatPart butterfly(FloatPart v) {
#if defined(__AVX2__)
  constexpr FloatPart kSign = Distance == 1   ? FloatPart{1, -1, 1, -1, 1, -1, 1, -1}
                              : Distance == 2 ? FloatPart{1, 1, -1, -1, 1, 1, -1, -1}
                                              : FloatPart{1, 1, 1, 1, -1, -1, -1, -1};
  constexpr int d = Distance;
  const FloatPart other = __builtin_shufflevector(v, v, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d);
#else
  constexpr FloatPart kSign = Distance == 1 ? FloatPart{1, -1, 1, -1} : FloatPart{1, 1, -1, -1};
  constexpr int d = Distance;
  const FloatPart other = __builtin_shufflevector(v, v, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d);
#endif
  return other + kSign * v;
}
/// Hadamard transform of eight values, not scaled.
inline F8 hadamard8(F8 v) {
#if defined(__AVX2__)
  return {butterfly<4>(butterfly<2>(butterfly<1>(v.a)))};
#else
  const FloatPart a = butterfly<2>(butterfly<1>(v.a)), b = butterfly<2>(butterfly<1>(v.b));
  return {a + b, a - b};
#endif
}

using Quad = float __attribute__((vector_size(16)));
/// Lane i plus lane i + 4.
inline Quad fold(F8 v) {
#if defined(__AVX2__)
  return __builtin_shufflevector(v.a, v.a, 0, 1, 2, 3) + __builtin_shufflevector(v.a, v.a, 4, 5, 6, 7);
#else
  return v.a + v.b;
#endif
}
/// sums[i] = sum(v[i]), with the same bits.
inline void sum4(const F8* v, float* sums) {
  const Quad h0 = fold(v[0]), h1 = fold(v[1]), h2 = fold(v[2]), h3 = fold(v[3]);
  // [a+c of 0, of 1, b+d of 0, of 1] in the names of sum()
  const Quad low = __builtin_shufflevector(h0, h1, 0, 4, 1, 5) + __builtin_shufflevector(h0, h1, 2, 6, 3, 7);
  const Quad high = __builtin_shufflevector(h2, h3, 0, 4, 1, 5) + __builtin_shufflevector(h2, h3, 2, 6, 3, 7);
  const Quad all = __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
  std::memcpy(sums, &all, sizeof all);
}

inline U8 gather(const uint32_t* p, int stride) {
#if defined(__AVX2__)
  return {UintPart{p[0], p[stride], p[2 * stride], p[3 * stride], p[4 * stride], p[5 * stride], p[6 * stride],
                   p[7 * stride]}};
#else
  return {UintPart{p[0], p[stride], p[2 * stride], p[3 * stride]},
          UintPart{p[4 * stride], p[5 * stride], p[6 * stride], p[7 * stride]}};
#endif
}
/// Lane l of the result is lane l − 1 of v; lane 0 is lane 7.
inline U8 rotate_up(U8 v) {
  uint32_t l[9];
  std::memcpy(l + 1, &v, sizeof v);
  l[0] = l[8];
  std::memcpy(&v, l, sizeof v);
  return v;
}
inline U8 operator<<(U8 v, int n) {
  return each<U8>([n](UintPart p) { return p << n; }, v);
}
inline U8 operator>>(U8 v, int n) {
  return each<U8>([n](UintPart p) { return p >> n; }, v);
}
inline U8 operator&(U8 v, uint32_t c) {
  return each<U8>([c](UintPart p) { return p & c; }, v);
}
inline U8 operator^(U8 v, uint32_t c) {
  return each<U8>([c](UintPart p) { return p ^ c; }, v);
}
inline U8 operator*(U8 v, uint32_t c) {
  return each<U8>([c](UintPart p) { return p * c; }, v);
}
inline U8 operator+(U8 v, uint32_t c) {
  return each<U8>([c](UintPart p) { return p + c; }, v);
}
inline U8 operator|(U8 x, U8 y) {
  return each<U8>([](UintPart p, UintPart q) { return p | q; }, x, y);
}
inline U8 operator+(U8 x, U8 y) {
  return each<U8>([](UintPart p, UintPart q) { return p + q; }, x, y);
}
inline F8 as_float(U8 v) {
  F8 f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}
inline U8 as_uint(F8 v) {
  U8 u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}
/// Integers below 2³¹ as floats.
inline F8 to_float(U8 v) {
  return each<F8>(
      [](UintPart p) {
        using IntPart = int32_t __attribute__((vector_size(4 * kLanes)));
        return __builtin_convertvector(reinterpret_cast<IntPart>(p), FloatPart);
      },
      v);
}

}  // namespace glm53::cpu::GLM53_SIMD
