// Rows of an attention mask, and what an element says.
#pragma once

#include <cuda/std/type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention/params.h"

namespace sage {

// Where a row of the mask begins.
__device__ __forceinline__ const uint8_t* mask_row(const AttentionMask& mask, int batch, int head, int row) {
  return static_cast<const uint8_t*>(mask.data) + batch * mask.batch_stride + head * mask.head_stride + row * mask.row_stride;
}

// What a number adds to a score, in log2 units. What is meant as -infinity becomes it: half a million and more below zero, where float32
// hardly tells scores apart, and float16's least number.
__device__ __forceinline__ float mask_value(float value, float hides = -5e5f) {
  return value <= hides ? -INFINITY : value * static_cast<float>(kLog2E);
}

// The same of an element of the mask's bits.
__device__ __forceinline__ float mask_value(AttentionMask::Type type, uint32_t bits) {
  constexpr float kLeastHalf = -65504.0f;
  if (type == AttentionMask::kBool) return bits != 0 ? 0.0f : -INFINITY;
  if (type == AttentionMask::kFloat) return mask_value(__uint_as_float(bits));
  if (type == AttentionMask::kHalf) return mask_value(__half2float(__ushort_as_half(static_cast<uint16_t>(bits))), kLeastHalf);
  return mask_value(__uint_as_float(bits << 16));
}

// And of one that lies there.
__device__ __forceinline__ float mask_value(int type, const uint8_t* element) {
  if (type == AttentionMask::kBool) return mask_value(AttentionMask::kBool, uint32_t{*element});
  if (type == AttentionMask::kFloat) return mask_value(AttentionMask::kFloat, *reinterpret_cast<const uint32_t*>(element));
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(element);
  if (type == AttentionMask::kHalf) return mask_value(AttentionMask::kHalf, bits);
  return mask_value(AttentionMask::kBfloat16, bits);
}

// Two elements, of whose bits those that hide become -infinity's.
template <typename Element>
__device__ __forceinline__ uint32_t hidden_to_infinity(uint32_t pair) {
  uint32_t hidden, infinity;
  if constexpr (cuda::std::is_same_v<Element, __half>) {
    hidden = __hle2_mask(reinterpret_cast<const __half2&>(pair), __float2half2_rn(-65504.0f));
    infinity = 0xfc00fc00u;
  } else {
    hidden = __hle2_mask(reinterpret_cast<const __nv_bfloat162&>(pair), __float2bfloat162_rn(-501760.0f));  // the first one below -5e5
    infinity = 0xff80ff80u;
  }
  return (pair & ~hidden) | (infinity & hidden);
}

}  // namespace sage
