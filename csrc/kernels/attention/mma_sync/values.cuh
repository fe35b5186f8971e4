// P V for a chunk of keys, added to the output.
#pragma once

#include "kernels/attention/mma_sync/scores.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace sage {

// V in 16 bits, float32 sums: the tensor cores add to the output itself.
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
        ptx::mma_m16n8k16_f32<typename Config::Element>(state.out[m][pair * 2], probabilities[m][step], v[0], v[1]);
        ptx::mma_m16n8k16_f32<typename Config::Element>(state.out[m][pair * 2 + 1], probabilities[m][step], v[2], v[3]);
      }
    }
  }
}

// V in FP16, FP16 sums of 32 keys.
template <typename Config>
__device__ __forceinline__ void accumulate_f16_sums(const Probabilities<Config>& probabilities, uint32_t v_lane,
                                                    State<Config>& state) {
#pragma unroll
  for (int first = 0; first < Config::kPvSteps; first += 2) {
#pragma unroll
    for (int pair = 0; pair < Config::kOTiles / 2; ++pair) {
      uint32_t sums[Config::kMTiles][2][2] = {};
#pragma unroll
      for (int step = first; step < first + 2; ++step) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, (v_lane + step * 16 * Config::kVRowBytes) ^ (pair * 32));
#pragma unroll
        for (int m = 0; m < Config::kMTiles; ++m) {
          ptx::mma_m16n8k16_f16(sums[m][0], probabilities[m][step], v[0], v[1]);
          ptx::mma_m16n8k16_f16(sums[m][1], probabilities[m][step], v[2], v[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 sum = Pair<__half>::unpack(sums[m][i / 2][i % 2]);
          state.out[m][pair * 2 + i / 2][i % 2 * 2] += sum.x;
          state.out[m][pair * 2 + i / 2][i % 2 * 2 + 1] += sum.y;
        }
      }
    }
  }
}

// V in e4m3: the sum of 32 keys times V's scale.
template <typename Config>
__device__ __forceinline__ void accumulate_f8(const Probabilities<Config>& probabilities, uint32_t v_lane,
                                              uint32_t v_scale, State<Config>& state) {
#pragma unroll
  for (int step = 0; step < Config::kPvSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Config::kOTiles / 2; ++pair) {
      uint32_t v[4];
      ptx::ldmatrix_x4(v, (v_lane + pair * 16 * Config::kVRowBytes) ^ (step * 32));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 scale = ptx::load_shared_float2(v_scale + (pair * 2 + half) * 32);
#pragma unroll
        for (int m = 0; m < Config::kMTiles; ++m) {
          float sum[4];
          if constexpr (Config::kSums == Sums::kFloat) {
            ptx::mma_m16n8k32_e4m3(sum, probabilities[m][step], v[half * 2], v[half * 2 + 1]);
          } else {
            uint32_t packed[2];
            ptx::mma_m16n8k32_e4m3(packed, probabilities[m][step], v[half * 2], v[half * 2 + 1]);
            unpack<__half>(sum, packed);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) state.out[m][pair * 2 + half][i] += sum[i] * (i % 2 == 0 ? scale.x : scale.y);
        }
      }
    }
  }
}

}  // namespace sage
