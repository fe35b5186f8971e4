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

// What quant_kv_fp4 leaves out: the value of a sequence's first key, as it is, for its block. Where all rows like that key, as an attention
// sink, it is most of the output, and among 15 larger values it would be rounded away.
template <typename Config>
__device__ __forceinline__ void add_first_key(const typename Config::Params& p, const Fp4Tile& tile, const Fp4Probabilities<Config>& probabilities,
                                              uint32_t stage, int positive, Fp4State<Config>& state) {
  const int lane = threadIdx.x % 32;
  float first[Config::kRows];  // its probability as rounded: the lane that has column 0 tells the other three
#pragma unroll
  for (int m = 0; m < Config::kMFragments; ++m) {
    uint32_t scales, none;
    ptx::unpack_e4m3x4(scales, none, probabilities.scales[m]);
    const float2 scale = Pair<__half>::unpack(scales);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[4];
      ptx::unpack_e2m1x8(pairs, probabilities.codes[m][i]);
      first[2 * m + i] = __shfl_sync(0xffffffffu, Pair<__half>::unpack(pairs[0]).x * (i == 0 ? scale.x : scale.y), lane / 4 * 4);
    }
  }
  const bool smoothed = p.v_mean != nullptr && ptx::load_shared_float(stage + Config::kVScaleOffset + Config::kUnsmoothedFlag) == 0.0f;
  using Element = typename Config::Element;
  const auto* v = reinterpret_cast<const uint16_t*>(row_pointer<Element>(p.v, tile.batch, tile.kv_head, tile.kv_token));
  const float* mean = p.v_mean + tile.kv_mean * Config::kHeadDim;
#pragma unroll
  for (int d = 0; d < Config::kOFragments; ++d) {
    if (!one_lot_after_the_other(positive)) continue;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int channel = d * 8 + lane % 4 * 2 + odd;
      float value = channel < p.v_head_dim ? Pair<Element>::unpack(v[channel]).x : 0.0f;
      if (smoothed) value -= mean[channel];
      value *= 1.0f / QuantV::kScaleUnit;
#pragma unroll
      for (int row = 0; row < Config::kRows; ++row) {
        if (first[row] != 0.0f) state.out[row / 2][d][row % 2 * 2 + odd] += first[row] * value;  // the value need not be a number where nobody sees it
      }
    }
  }
}

}  // namespace sage
