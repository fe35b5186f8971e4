// P V of a block of keys, added to the output.
#pragma once

#include "kernels/attention/fp4/softmax.cuh"
#include "kernels/attention/mma_sync/values.cuh"

namespace sage {

// Sums of products of a block are brought to V's unit by ordinary instructions, which keeps more bits of long sums than the tensor cores may.
__device__ __forceinline__ void accumulate_fp4(const Fp4Probabilities& probabilities, const ScaleSpread& spread, uint32_t stage,
                                               uint32_t v_lane, int positive, Fp4State& state) {
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
    if (!one_after_the_other(positive)) continue;
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

// Adds what quant_kv_fp4 and softmax_fp4 leave out: the first key that any query sees, its value as it is, its probability in float32. Where all rows like that
// key, as an attention sink, it is most of the output, and among 15 larger values it would be rounded away.
__device__ __forceinline__ void add_first_key(const Config::Params& p, const Fp4Tile& tile, uint32_t first_scores, int positive,
                                              Fp4State& state) {
  const int lane = threadIdx.x % 32;
  float score[Config::kRows];
  bool seen = false;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    score[row] = ptx::load_shared_float(first_scores + row * 32);
    seen |= score[row] != -INFINITY;
  }
  if (!__any_sync(0xffffffffu, seen)) return;  // there may be none

  float first[Config::kRows];  // its probability
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const float base = ptx::max_nan(state.base[row], score[row]), factor = ptx::ex2(state.base[row] - base);
    first[row] = ptx::ex2(score[row] - base);
    state.base[row] = base;
    float* sums = state.sums[row / 2] + row % 2 * 2;
    sums[0] = sums[0] * factor + first[row];
    sums[1] *= factor;
#pragma unroll
    for (int d = 0; d < Config::kOFragments; ++d) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) state.out[row / 2][d][row % 2 * 2 + odd] *= factor;
    }
  }
  using Element = Config::Element;
  const auto* v = reinterpret_cast<const uint16_t*>(row_pointer<Element>(p.v, tile.batch, tile.kv_head, tile.kv_token + tile.apart));
#pragma unroll
  for (int d = 0; d < Config::kOFragments; ++d) {
    if (!one_after_the_other(positive)) continue;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int channel = d * 8 + lane % 4 * 2 + odd;
      const float value = channel < p.v_head_dim ? Pair<Element>::unpack(v[channel]).x * (1.0f / QuantV::kScaleUnit) : 0.0f;
#pragma unroll
      for (int row = 0; row < Config::kRows; ++row) {
        if (first[row] != 0.0f) state.out[row / 2][d][row % 2 * 2 + odd] += first[row] * value;  // the value need not be a number where nobody sees it
      }
    }
  }
}

}  // namespace sage
