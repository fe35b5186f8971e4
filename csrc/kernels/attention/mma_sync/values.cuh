// P V for a chunk of keys, added to the output.
#pragma once

#include "kernels/attention/mma_sync/scores.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace sage {

// V in 16 bits. With float32 sums the tensor cores add to the output itself; FP16 sums are those of 16 keys.
template <typename Config>
__device__ __forceinline__ void accumulate_f16(const Probabilities<Config>& probabilities, uint32_t v_lane,
                                               State<Config>& state) {
#pragma unroll
  for (int step = 0; step < Config::kPvSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Config::kOTiles / 2; ++pair) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, (v_lane + step * 16 * Config::kVRowBytes) ^ (pair * 32));
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&out)[4] = state.out[m][pair * 2 + half];
          if constexpr (Config::kSums == Sums::kFloat) {
            ptx::mma_m16n8k16_f32<typename Config::Element>(out, probabilities[m][step], v[half * 2], v[half * 2 + 1]);
          } else {
            uint32_t packed[2];
            float sum[4];
            ptx::mma_m16n8k16_f16(packed, probabilities[m][step], v[half * 2], v[half * 2 + 1]);
            unpack<__half>(sum, packed);
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] += sum[i];
          }
        }
      }
    }
  }
}

// V in e4m3: the sum of a stage's keys times V's scale. Channels are taken a few at a time, each lot behind a branch that is
// always taken: else the compiler starts all products first, and their sums do not fit the registers beside the output.
template <typename Config>
__device__ __forceinline__ void accumulate_f8(const Probabilities<Config>& probabilities, uint32_t v_lane,
                                              uint32_t v_scale, int positive, State<Config>& state) {
#pragma unroll
  for (int pair = 0; pair < Config::kOTiles / 2; ++pair) {
    ptx::keep(positive);
    if (positive > 0) {
      uint32_t v[2][4];  // of 32 keys each
      ptx::ldmatrix_x4(v[0], v_lane + pair * 16 * Config::kVRowBytes);
      ptx::ldmatrix_x4(v[1], (v_lane + pair * 16 * Config::kVRowBytes) ^ 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 scale = ptx::load_shared_float2(v_scale + (pair * 2 + half) * 32);
#pragma unroll
        for (int m = 0; m < Config::kMTiles; ++m) {
          float sum[4] = {};
          if constexpr (Config::kConvert) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              uint32_t low, high;
              ptx::unpack_e4m3x4(low, high, v[step / 2][half * 2 + step % 2]);
              ptx::mma_m16n8k16_f32<__half>(sum, probabilities[m][step], low, high);
            }
          } else if constexpr (Config::kSums == Sums::kFloat) {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              ptx::mma_m16n8k32_e4m3(sum, probabilities[m][step], v[step][half * 2], v[step][half * 2 + 1]);
            }
          } else {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              uint32_t packed[2];
              float some[4];
              ptx::mma_m16n8k32_e4m3(packed, probabilities[m][step], v[step][half * 2], v[step][half * 2 + 1]);
              unpack<__half>(some, packed);
#pragma unroll
              for (int j = 0; j < 4; ++j) sum[j] += some[j];
            }
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) state.out[m][pair * 2 + half][j] += sum[j] * (j % 2 == 0 ? scale.x : scale.y);
        }
      }
    }
  }
}

}  // namespace sage
