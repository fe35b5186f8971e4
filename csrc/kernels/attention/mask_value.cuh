// An element of an attention mask.
#pragma once

#include <cuda_fp16.h>

#include "kernels/attention/params.h"

namespace sage {

// What a number adds to a score, in log2 units. What is meant as -infinity becomes it: half a million and more below zero, where float32
// hardly tells scores apart, and float16's least number.
__device__ __forceinline__ float mask_value(float value, float hides = -5e5f) {
  constexpr float kLog2E = 1.4426950408889634f;
  return value <= hides ? -INFINITY : value * kLog2E;
}

// The same of an element of the mask.
__device__ __forceinline__ float mask_value(int type, const uint8_t* element) {
  constexpr float kLeastHalf = -65504.0f;
  if (type == AttentionMask::kBool) return *element ? 0.0f : -INFINITY;
  if (type == AttentionMask::kFloat) return mask_value(*reinterpret_cast<const float*>(element));
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(element);
  if (type == AttentionMask::kHalf) return mask_value(__half2float(__ushort_as_half(bits)), kLeastHalf);
  return mask_value(__uint_as_float(bits << 16));
}

}  // namespace sage
