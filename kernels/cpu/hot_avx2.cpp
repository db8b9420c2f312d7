// The hot kernels for x86-64 with AVX2 and FMA (compiled with those flags, see kernels/CMakeLists.txt); empty
// elsewhere.
#if defined(__x86_64__)
#define GLM53_SIMD avx2
#include "kernels/cpu/hot_impl.h"

#if !defined(__AVX2__) || !defined(__FMA__)
#error "compile this file with -mavx2 -mfma"
#endif

namespace glm53::cpu {

const HotKernels& hot_avx2();
const HotKernels& hot_avx2() {
  static constexpr HotKernels kAvx2{"avx2",         avx2::dense,     avx2::trellis, avx2::decode_tile,
                                    avx2::hadamard, avx2::square_sum};
  return kAvx2;
}

}  // namespace glm53::cpu
#endif
