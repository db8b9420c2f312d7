// The hot kernels with the instructions every machine of this architecture has, and the choice among variants.
#define GLM53_SIMD base
#include "kernels/cpu/hot_impl.h"

namespace glm53::cpu {

namespace {

constexpr HotKernels kBase{"base", base::dense, base::trellis, base::decode_tile, base::hadamard, base::square_sum};

}  // namespace

#if defined(__x86_64__)
const HotKernels& hot_avx2();

namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace

std::span<const HotKernels* const> hot_variants() {
  static const HotKernels* const all[] = {&kBase, &hot_avx2()};
  return std::span(all).first(has_avx2() ? 2 : 1);
}
#else
std::span<const HotKernels* const> hot_variants() {
  static const HotKernels* const all[] = {&kBase};
  return all;
}
#endif

const HotKernels& hot_kernels() {
  static const HotKernels& best = *hot_variants().back();
  return best;
}

}  // namespace glm53::cpu
