// Numbers in e2m1, with a scale in e4m3 for each 16 of them.
#pragma once

#include "kernels/element.cuh"
#include "kernels/ptx/float4.cuh"
#include "kernels/ptx/float8.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/fp4.h"

namespace sage {

// Two numbers in e4m3, in the lower 16 bits, and what they have become.
__device__ __forceinline__ uint32_t round_to_e4m3(float& low, float& high) {
  const uint32_t bits = ptx::pack_e4m3x2(low, high);
  uint32_t pair, none;
  ptx::unpack_e4m3x4(pair, none, bits);
  const float2 rounded = Pair<__half>::unpack(pair);
  low = rounded.x;
  high = rounded.y;
  return bits;
}

// Eight numbers of `Groups` groups (one, or four each of two) to e2m1, given in a unit of which Fp4::kLargest is the largest. Lanes have the
// rest of their groups: reduce(x, op) brings together what they have. Scales are those, of two, with which a group's squared error is less: its
// largest number becomes 6, or 4, between which e2m1 has nothing. NaN and infinity make the scale NaN.
template <int Groups, typename Reduce>
__device__ __forceinline__ uint32_t quantise_fp4(const float (&x)[8], const Reduce& reduce, float (&scales)[Groups]) {
  constexpr int kEach = 8 / Groups;
  float candidates[2][Groups], errors[2][Groups];
  uint32_t codes[2];
#pragma unroll
  for (int group = 0; group < Groups; ++group) {
    float magnitude = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) magnitude = ptx::max_nan(magnitude, fabsf(x[group * kEach + i]));
    magnitude = reduce(magnitude, ptx::max_nan);
    magnitude += magnitude - magnitude;  // NaN where it is infinite
    candidates[0][group] = ptx::max_nan(magnitude * (1.0f / 6.0f), Fp4::kSmallestScale);
    candidates[1][group] = ptx::max_nan(magnitude * (1.0f / 4.0f), Fp4::kSmallestScale);
    round_to_e4m3(candidates[0][group], candidates[1][group]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float scaled[8], rounded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) scaled[j] = x[j] * __frcp_rn(candidates[i][j / kEach]);
    codes[i] = ptx::pack_e2m1x8(scaled);
    uint32_t pairs[4];
    ptx::unpack_e2m1x8(pairs, codes[i]);
    unpack<__half>(rounded, pairs);
#pragma unroll
    for (int group = 0; group < Groups; ++group) {
      float error = 0.0f;
#pragma unroll
      for (int j = group * kEach; j < (group + 1) * kEach; ++j) {
        const float difference = rounded[j] * candidates[i][group] - x[j];
        error += difference * difference;
      }
      errors[i][group] = reduce(error, [](float a, float b) { return a + b; });
    }
  }
  uint32_t answer = 0;
#pragma unroll
  for (int group = 0; group < Groups; ++group) {
    const int better = errors[1][group] < errors[0][group];
    scales[group] = better ? candidates[1][group] : candidates[0][group];
    const uint32_t bits = (1ull << 4 * kEach) - 1;
    answer |= (better ? codes[1] : codes[0]) & bits << group * 4 * kEach;
  }
  return answer;
}

// Two neighbouring lanes have a group.
struct OfTwoLanes {
  template <typename Op>
  __device__ __forceinline__ float operator()(float x, const Op& op) const {
    return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
  }
};

// The largest magnitude, where a number is finite.
__device__ __forceinline__ float larger_finite(float magnitude, float x) { return fabsf(x) < INFINITY ? fmaxf(magnitude, fabsf(x)) : magnitude; }

}  // namespace sage
