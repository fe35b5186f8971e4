// From a chunk's scores to its probabilities in FP4, and the rows' running bases.
#pragma once

#include "kernels/attention/fp4/scores.cuh"
#include "kernels/attention/quad.cuh"

namespace sage {

// What a lane keeps of its rows.
struct Fp4State {
  float out[Config::kMFragments][Config::kOFragments][4];
  // Of 16 rows each: of row lane / 4 the sum of its probabilities and of those that fell on keys whose V was smoothed; of row lane / 4 + 8.
  float sums[Config::kMFragments][4];
  float base[Config::kRows];  // in log2 units: what probabilities are relative to
};

// Of a block of keys: A fragments, and the scales of a lane's two groups of each row, as ScaleSpread takes them.
struct Fp4Probabilities {
  uint32_t codes[Config::kMFragments][4];
  uint32_t scales[Config::kMFragments];
};

// Where any group of a row would exceed what e4m3 holds, the row's base becomes its largest score of this chunk, less kLevel; what was
// computed relative to the old one is brought along. `top` is the largest score of the lane's group of the row.
__device__ __forceinline__ void raise_base(int m, int i, float top, bool exceeds, int chunk, Fp4State& state,
                                           Fp4Probabilities& probabilities) {
  const int row = 2 * m + i;
  const bool raise = any_of_row(exceeds);
  const float largest = ptx::max_nan(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const float base = raise ? largest - Config::kLevel : state.base[row];
  const float factor = raise ? ptx::ex2(state.base[row] - base) : 1.0f;
  state.base[row] = base;
#pragma unroll
  for (int d = 0; d < Config::kOFragments; ++d) {
    state.out[m][d][2 * i] *= factor;
    state.out[m][d][2 * i + 1] *= factor;
  }
  state.sums[m][2 * i] *= factor;
  state.sums[m][2 * i + 1] *= factor;
  if (chunk > 0) {
    uint32_t pair, none;
    ptx::unpack_e4m3x4(pair, none, probabilities.scales[m]);
    const float2 scales = Pair<__half>::unpack(pair);
    probabilities.scales[m] = ptx::pack_e4m3x2(scales.x * (i == 0 ? factor : 1.0f), scales.y * (i == 1 ? factor : 1.0f));
  }
}

// Probabilities of the m-th 16 rows. A group's scale is found before its exponentials, of which it then is a part.
__device__ __forceinline__ void exponentiate(LogScores<Config>& scores, float unit, int m, int chunk, Fp4State& state,
                                             Fp4Probabilities& probabilities) {
  float top[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = scores[0][2 * i];
#pragma unroll
    for (int j = 1; j < Config::kNFragments * 2; ++j) largest = ptx::max_nan(largest, scores[j / 2][2 * i + j % 2]);
    top[i] = ptx::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1)) * unit;
  }
  const auto exceeds = [&](int i) { return !(top[i] - state.base[2 * m + i] <= Config::kHeadroom); };  // or is no number
  if (__builtin_expect(__any_sync(0xffffffffu, exceeds(0) || exceeds(1)), 0)) {
    const bool raise[2] = {exceeds(0), exceeds(1)};
#pragma unroll
    for (int i = 0; i < 2; ++i) raise_base(m, i, top[i], raise[i], chunk, state, probabilities);
  }
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) scale[i] = ptx::max_nan(ptx::ex2(top[i] - state.base[2 * m + i] - Config::kLogOf6), Fp4::kSmallestScale);
  const uint32_t bits = round_to_e4m3(scale[0], scale[1]);
  probabilities.scales[m] = chunk == 0 ? bits : probabilities.scales[m] | bits << 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float offset = state.base[2 * m + i] + ptx::lg2(scale[i]);
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = ptx::ex2(scores[j / 2][2 * i + j % 2] * unit - offset);
    probabilities.codes[m][2 * chunk + i] = ptx::pack_e2m1x8(x);
  }
}

// Puts a row's score with the first key that is seen aside, which is this column of the chunk, for add_first_key: where it is far above the
// others, as of an attention sink, they would be below all that a base so high leaves.
__device__ __forceinline__ void set_first_apart(int m, int column, float unit, uint32_t first_scores, LogScores<Config>& scores) {
  const int own = column - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < Config::kNFragments; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (own != n * 8 + i % 2) continue;
      ptx::store_shared_float(first_scores + (2 * m + i / 2) * 32, scores[n][i] * unit);
      scores[n][i] = -INFINITY;
    }
  }
}

// Probabilities of a block of keys.
__device__ __forceinline__ void softmax_fp4(const Config::Params& p, const Fp4Tile& tile, const Fp4Queries& q,
                                            const Fp4KeyBlock& block, uint32_t stage, uint32_t k_lane, uint32_t first_scores, int first_key,
                                            Fp4State& state, Fp4Probabilities& probabilities) {
  const bool none_seen = state.base[0] == Config::kNever;  // as before the first key that is, of all rows; one register is asked sooner than the tile
#pragma unroll
  for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
    float scores[Config::kMFragments][Config::kNFragments][4];
    compute_scores(q, block, stage, k_lane, chunk, scores);
    float unit = block.unit;
    if (block.hidden != Hidden::kNothing) {
#pragma unroll
      for (int m = 0; m < Config::kMFragments; ++m) hide(p, tile, block, m, first_key + chunk * Config::kChunkN, scores[m]);
      unit = 1.0f;
    }
    if (__builtin_expect(none_seen, 0)) {
      const int column = tile.apart - first_key - chunk * Config::kChunkN;
      if (column >= 0 && column < Config::kChunkN) {
#pragma unroll
        for (int m = 0; m < Config::kMFragments; ++m) set_first_apart(m, column, unit, first_scores, scores[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < Config::kMFragments; ++m) exponentiate(scores[m], unit, m, chunk, state, probabilities);
  }
}

}  // namespace sage
