// An element of an attention mask.
#pragma once

#include <cuda_fp16.h>

#include "kernels/attention/params.h"

namespace sage {

// What the mask adds to a score, in log2 units. The least numbers of a type are meant as -infinity and become it.
__device__ __forceinline__ float mask_value(int type, const uint8_t* element) {
  constexpr float kLog2E = 1.4426950408889634f;
  if (type == AttentionMask::kBool) return *element ? 0.0f : -INFINITY;
  float value;
  if (type == AttentionMask::kFloat) {
    value = *reinterpret_cast<const float*>(element);
  } else {
    const uint16_t bits = *reinterpret_cast<const uint16_t*>(element);
    value = type == AttentionMask::kHalf ? __half2float(__ushort_as_half(bits)) : __uint_as_float(bits << 16);
  }
  return value < -1e30f ? -INFINITY : value * kLog2E;
}

}  // namespace sage
