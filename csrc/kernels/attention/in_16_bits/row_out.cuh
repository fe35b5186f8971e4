// What is left of a row to do when all its keys have been looked at.
#pragma once

#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"

namespace sage {

// What a score weighs that is relative to another reference; 0 where there is none.
__device__ __forceinline__ float weight_of(float largest, float reference) { return largest == -INFINITY ? 0.0f : ptx::ex2(largest - reference); }

// What sums are multiplied by. A row that sees no key is zero.
__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

// Four channels of the output.
template <typename Element>
__device__ __forceinline__ void store_channels(Element* to, float4 sums, float total) {
  const float inverse = inverse_of(total);
  *reinterpret_cast<uint2*>(to) = make_uint2(Pair<Element>::pack(sums.x * inverse, sums.y * inverse), Pair<Element>::pack(sums.z * inverse, sums.w * inverse));
}

// Natural, of probabilities that are 2^level at the largest score.
__device__ __forceinline__ float log_sum_exp(float largest, float total, float level) {
  constexpr float kLn2 = 0.6931471805599453f;
  return total == 0.0f ? -INFINITY : (largest - level + ptx::lg2(total)) * kLn2;
}

}  // namespace sage
