// e4m3: 8-bit floating point with 3 bits of mantissa, at most 448 (sm_89 on).
#pragma once

#include <cuda_fp16.h>

#include "kernels/tensor_view.h"

namespace sage::ptx {

// Four numbers, rounded to nearest even; what is larger becomes 448, NaN stays.
__device__ __forceinline__ uint32_t pack_e4m3x4(float x0, float x1, float x2, float x3) {
  uint32_t bits;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(bits)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return bits;
}

// Two numbers, as the lower half of a word. Four of which two are zero would do, were it not for ptxas 13.0: once it took the zeros, which it makes
// by a conversion and shares, out of another register than that one, and probabilities became NaN.
__device__ __forceinline__ uint32_t pack_e4m3x2(float x0, float x1) {
  uint32_t bits;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "mov.b16 high, 0;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(bits)
      : "f"(x0), "f"(x1));
  return bits;
}

// As two pairs in fp16.
__device__ __forceinline__ void unpack_e4m3x4(uint32_t& low, uint32_t& high, uint32_t bits) {
  asm("{\n.reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(bits));
}

}  // namespace sage::ptx
