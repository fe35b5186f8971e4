// P V of a block of keys, added to the output.
#pragma once

#include "kernels/attention/fp4/softmax.cuh"

namespace sage {

// Sums of products of a block are brought to V's unit by ordinary instructions, which keeps more bits of long sums than the tensor cores may.
template <typename Config>
__device__ __forceinline__ void accumulate_fp4(const Fp4Probabilities<Config>& probabilities, const ScaleSpread& spread, uint32_t stage,
                                               uint32_t v_lane, int positive, Fp4State<Config>& state) {
  constexpr float kNone[4] = {};
  const int lane = threadIdx.x % 32;
  uint32_t scales[Config::kMFragments];
#pragma unroll
  for (int m = 0; m < Config::kMFragments; ++m) scales[m] = spread(probabilities.scales[m]);

  // Sums of probabilities as rounded are their product with ones; in odd columns, with ones where V is smoothed.
  constexpr uint32_t kOnes = 0x22222222, kOneScales = 0x38383838;
  const bool unsmoothed = ptx::load_shared_float(stage + Config::kVScaleOffset + Config::kUnsmoothedFlag) != 0.0f;
  const uint32_t ones = unsmoothed && lane / 4 % 2 == 1 ? 0u : kOnes;
#pragma unroll
  for (int m = 0; m < Config::kMFragments; ++m) {
    float sums[4];
    ptx::mma_m16n8k64_e2m1(sums, probabilities.codes[m], ones, ones, kNone, scales[m], kOneScales);
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sums[m][i] += sums[i];
  }

  const uint32_t codes = stage + Config::kVOffset + v_lane;
  const uint32_t group_scales = stage + Config::kVGroupScaleOffset + lane / 4 * 8;
  const uint32_t v_scales = stage + Config::kVScaleOffset + lane % 4 * 8;
#pragma unroll
  for (int pair = 0; pair < Config::kOFragments / 2; ++pair) {
    if (!one_lot_after_the_other(positive)) continue;
    uint32_t v[4], group_scale[2];
    ptx::ldmatrix_x4(v, codes + pair * 16 * Config::kVRowBytes);
    ptx::load_shared_words(group_scale, group_scales + pair * 64);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 scale = ptx::load_shared_float2(v_scales + (pair * 2 + half) * 32);
#pragma unroll
      for (int m = 0; m < Config::kMFragments; ++m) {
        float sums[4];
        ptx::mma_m16n8k64_e2m1(sums, probabilities.codes[m], v[half * 2], v[half * 2 + 1], kNone, scales[m], group_scale[half]);
#pragma unroll
        for (int i = 0; i < 4; ++i) state.out[m][pair * 2 + half][i] += sums[i] * (i % 2 == 0 ? scale.x : scale.y);
      }
    }
  }
}

}  // namespace sage
