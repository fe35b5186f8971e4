// What is left of a row to do when all its keys have been looked at.
#pragma once

#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"

namespace sage {

// What makes sums that are relative to a largest score relative to another one; 0 where there is none.
__device__ __forceinline__ float weight_of(float largest, float other) { return largest == -INFINITY ? 0.0f : ptx::ex2(largest - other); }

// What sums are multiplied by. A row that sees no key is zero.
__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

// Of some parts of a row's keys: four channels of the output, and the row's sum, relative to their largest score.
struct Parts {
  float4 out = {};
  float largest = -INFINITY, total = 0.0f;

  __device__ __forceinline__ void add(float4 x, float other_largest, float other_total) {
    const float before = largest;
    largest = fmaxf(before, other_largest);
    const float rescale = weight_of(before, largest), weight = weight_of(other_largest, largest);
    total = total * rescale + other_total * weight;
    out = make_float4(out.x * rescale + x.x * weight, out.y * rescale + x.y * weight, out.z * rescale + x.z * weight, out.w * rescale + x.w * weight);
  }
};

// Adds up what lanes have of the same channels, whose numbers differ in the bits `first` to below `end`. All lanes of a warp.
__device__ __forceinline__ void add_of_lanes(Parts& parts, int first, int end) {
  for (int other = first; other < end; other *= 2) {
    const auto of_other = [&](float x) { return __shfl_xor_sync(0xffffffffu, x, other); };
    parts.add(make_float4(of_other(parts.out.x), of_other(parts.out.y), of_other(parts.out.z), of_other(parts.out.w)), of_other(parts.largest),
              of_other(parts.total));
  }
}

// Four channels of the output.
template <typename Element>
__device__ __forceinline__ void store_channels(Element* to, float4 sums, float total) {
  const float inverse = inverse_of(total);
  *reinterpret_cast<uint2*>(to) = make_uint2(Pair<Element>::pack(sums.x * inverse, sums.y * inverse), Pair<Element>::pack(sums.z * inverse, sums.w * inverse));
}

// Natural, of probabilities that are 2^level at the largest score.
__device__ __forceinline__ float log_sum_exp(float largest, float total, float level) {
  return total == 0.0f ? -INFINITY : (largest - level + ptx::lg2(total)) * static_cast<float>(kLn2);
}

}  // namespace sage
