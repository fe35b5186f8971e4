// Scores of a chunk of keys, and what is to be hidden of them.
#pragma once

#include "kernels/attention/fp4/quantise_q.cuh"
#include "kernels/attention/mma_sync/scores.cuh"

namespace sage {

// What is the same for all chunks of a block of keys.
struct Fp4KeyBlock {
  float unit;     // of scores
  float inverse;  // of that
  Hidden hidden;
};

// Scores of the warp's rows. The tensor cores start from what subtracting Q's mean took off them.
__device__ __forceinline__ void compute_scores(const Fp4Queries& q, const Fp4KeyBlock& block, uint32_t stage, uint32_t k_lane, int chunk,
                                               float (&scores)[Config::kMFragments][Config::kNFragments][4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t codes = stage + k_lane + chunk * (Config::kChunkN * Config::kKRowBytes);
  const uint32_t scales = stage + Config::kKScaleOffset + (chunk * Config::kChunkN + lane / 4) * Config::kKScaleRowBytes;
  const uint32_t means = stage + Config::kMeanScoreOffset + (chunk * Config::kChunkN + lane % 4 * 2) * 4;
#pragma unroll
  for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
    uint32_t scale[2][Config::kQkSteps];
    float of_mean[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = pair * 16 + half * 8;
      ptx::load_shared_words(scale[half], scales + key * Config::kKScaleRowBytes);
      const float2 two = ptx::load_shared_float2(means + key * 4);
      of_mean[half][0] = of_mean[half][2] = two.x * block.inverse;
      of_mean[half][1] = of_mean[half][3] = two.y * block.inverse;
    }
#pragma unroll
    for (int step = 0; step < Config::kQkSteps; ++step) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, (codes + pair * 16 * Config::kKRowBytes) ^ (step * 32));
#pragma unroll
      for (int m = 0; m < Config::kMFragments; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&sums)[4] = scores[m][pair * 2 + half];
          ptx::mma_m16n8k64_e2m1(sums, q.codes[m][step], k[half * 2], k[half * 2 + 1], step == 0 ? of_mean[half] : sums, q.scales[m][step],
                                 scale[half][step]);
        }
      }
    }
  }
}

// Those of the m-th 16 rows in log2 units, with -infinity for what is hidden.
__device__ __forceinline__ void hide(const Config::Params& p, const Fp4Tile& tile, const Fp4KeyBlock& block, int m, int first_key,
                                     LogScores<Config>& scores) {
#pragma unroll
  for (int n = 0; n < Config::kNFragments; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] *= block.unit;
  }
  const Place<Config> place(tile, m, first_key);
  hide_past_end<Config>(p, tile, place, scores);
  if (block.hidden == Hidden::kByMask) add_mask<Config>(p, tile, place, scores);
}

}  // namespace sage
