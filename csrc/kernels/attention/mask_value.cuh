// Rows of an attention mask, and what an element says.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/element.cuh"

namespace sage {

// Where a row of the mask begins.
__device__ __forceinline__ const uint8_t* mask_row(const AttentionMask& mask, int batch, int head, int row) {
  return static_cast<const uint8_t*>(mask.data) + batch * mask.batch_stride + head * mask.head_stride + row * mask.row_stride;
}

// Bits of the largest element that hides, since it is meant as -infinity: half a million and more below zero, where float32 hardly tells scores
// apart (of bfloat16 what -5e5 is rounded to), and float16's least number.
template <int kType>
constexpr uint32_t kHides = kType == AttentionMask::kBool       ? 0
                            : kType == AttentionMask::kHalf     ? 0xfbff       // -65504
                            : kType == AttentionMask::kBfloat16 ? 0xc8f4       // -499712
                                                                : 0xc8f42400;  // -5e5

// What a number adds to a score, in log2 units.
__device__ __forceinline__ float mask_value(float value, float hides = __uint_as_float(kHides<AttentionMask::kFloat>)) {
  return value <= hides ? -INFINITY : value * static_cast<float>(kLog2E);
}

// The same of an element of the mask's bits.
__device__ __forceinline__ float mask_value(AttentionMask::Type type, uint32_t bits) {
  const auto half = [](uint32_t its_bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(its_bits))); };
  const auto bfloat16 = [](uint32_t its_bits) { return __uint_as_float(its_bits << 16); };
  if (type == AttentionMask::kBool) return bits != 0 ? 0.0f : -INFINITY;
  if (type == AttentionMask::kFloat) return mask_value(__uint_as_float(bits));
  if (type == AttentionMask::kHalf) return mask_value(half(bits), half(kHides<AttentionMask::kHalf>));
  return mask_value(bfloat16(bits), bfloat16(kHides<AttentionMask::kBfloat16>));
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
  using Two = typename Pair<Element>::Two;
  constexpr bool kHalf = Pair<Element>::kHalf;
  constexpr uint32_t hides = kHides<kHalf ? AttentionMask::kHalf : AttentionMask::kBfloat16> * 0x00010001u;
  constexpr uint32_t infinity = kHalf ? 0xfc00fc00u : 0xff80ff80u;
  const uint32_t hidden = __hle2_mask(reinterpret_cast<const Two&>(pair), reinterpret_cast<const Two&>(hides));
  return (pair & ~hidden) | (infinity & hidden);
}

}  // namespace sage
