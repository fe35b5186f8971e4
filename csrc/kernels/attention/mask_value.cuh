// An element of an attention mask.
#pragma once

#include <cuda_fp16.h>

#include "kernels/attention/params.h"

namespace sage {

// What the mask adds to a score, in log2 units. What is meant as -infinity becomes it: half a million and more below zero, where float32
// hardly tells scores apart, and float16's least number.
__device__ __forceinline__ float mask_value(int type, const uint8_t* element) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kHides = -5e5f, kLeastHalf = -65504.0f;
  if (type == AttentionMask::kBool) return *element ? 0.0f : -INFINITY;
  if (type == AttentionMask::kFloat) {
    const float value = *reinterpret_cast<const float*>(element);
    return value <= kHides ? -INFINITY : value * kLog2E;
  }
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(element);
  const bool half = type == AttentionMask::kHalf;
  const float value = half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(bits << 16);
  return value <= (half ? kLeastHalf : kHides) ? -INFINITY : value * kLog2E;
}

}  // namespace sage
