// P V for a chunk of keys, added to the output.
#pragma once

#include "kernels/attention/mma_sync/softmax.cuh"
#include "kernels/ptx/shared.cuh"

namespace sage {

// Where sums are added to the output by ordinary instructions, channels are taken a few at a time, behind a branch each that is always taken (`positive`
// is): else the compiler starts all products first, and their sums do not fit the registers beside the output.
__device__ __forceinline__ bool one_after_the_other(int& positive) {
  ptx::keep(positive);
  return positive > 0;
}

// V in 16 bits. With float32 sums the tensor cores add to the output itself; FP16 sums are those of a stage's keys, times V's scale.
template <typename Config>
__device__ __forceinline__ void accumulate_f16(const Probabilities<Config>& probabilities, uint32_t v_lane, uint32_t v_scale, int positive,
                                               State<Config>& state) {
  constexpr int kSteps = Config::kSums == Sums::kFloat ? 1 : Config::kPvSteps;  // of a sum
  if constexpr (Config::kScaled) ptx::keep(v_scale);
#pragma unroll
  for (int first = 0; first < Config::kPvSteps; first += kSteps) {
#pragma unroll
    for (int pair = 0; pair < Config::kOFragments / 2; ++pair) {
      if (Config::kSums == Sums::kHalf && !one_after_the_other(positive)) continue;
      uint32_t v[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::ldmatrix_x4_trans(v[step], (v_lane + (first + step) * 16 * Config::kVRowBytes) ^ (pair * 32));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (Config::kSums == Sums::kFloat) {
#pragma unroll
          for (int m = 0; m < Config::kMFragments; ++m) {
            ptx::mma_m16n8k16_f32<typename Config::Element>(state.out[m][pair * 2 + half], probabilities[m][first], v[0][half * 2],
                                                            v[0][half * 2 + 1]);
          }
        } else {
          const uint32_t exponents = ptx::load_shared_u16(v_scale + (pair * 2 + half) * 8);
          const float2 scale = make_float2(__uint_as_float((exponents & 0xff) << 23), __uint_as_float(exponents >> 8 << 23));
#pragma unroll
          for (int m = 0; m < Config::kMFragments; ++m) {
            uint32_t packed[2] = {};
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              ptx::mma_m16n8k16_f16(packed, probabilities[m][first + step], v[step][half * 2], v[step][half * 2 + 1]);
            }
            float sum[4];
            unpack<__half>(sum, packed);
#pragma unroll
            for (int i = 0; i < 4; ++i) state.out[m][pair * 2 + half][i] += sum[i] * (i % 2 == 0 ? scale.x : scale.y);
          }
        }
      }
    }
  }
}

// P's fragment of 16 rows and the group-th 16 keys in FP16.
template <typename Config>
__device__ __forceinline__ void convert(uint32_t (&fragment)[4], const Probabilities<Config>& probabilities, int m, int group) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    ptx::unpack_e4m3x4(fragment[row], fragment[row + 2], probabilities[m][group / 2][row + group % 2 * 2]);
  }
}

// V in e4m3: the sum of a stage's keys times V's scale.
template <typename Config>
__device__ __forceinline__ void accumulate_f8(const Probabilities<Config>& probabilities, uint32_t v_lane,
                                              uint32_t v_scale, int positive, State<Config>& state) {
  ptx::keep(v_lane);
  ptx::keep(v_scale);
  uint32_t halves[Config::kMFragments][4][4];  // P in FP16 where mma takes no e4m3
  if constexpr (Config::kConvert) {
#pragma unroll
    for (int m = 0; m < Config::kMFragments; ++m) {
#pragma unroll
      for (int group = 0; group < 4; ++group) convert<Config>(halves[m][group], probabilities, m, group);
    }
  }
#pragma unroll
  for (int pair = 0; pair < Config::kOFragments / 2; ++pair) {
    if (one_after_the_other(positive)) {
      uint32_t v[2][4];  // of 32 keys each
      ptx::ldmatrix_x4(v[0], v_lane + pair * 16 * Config::kVRowBytes);
      ptx::ldmatrix_x4(v[1], (v_lane + pair * 16 * Config::kVRowBytes) ^ 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 scale = ptx::load_shared_float2(v_scale + (pair * 2 + half) * 32);
#pragma unroll
        for (int m = 0; m < Config::kMFragments; ++m) {
          float sum[4] = {};
          uint32_t packed_sum[2] = {};  // in FP16
          if constexpr (Config::kConvert) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              uint32_t low, high;
              ptx::unpack_e4m3x4(low, high, v[step / 2][half * 2 + step % 2]);
              ptx::mma_m16n8k16_f32<__half>(sum, halves[m][step], low, high);
            }
          } else {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              if constexpr (Config::kSums == Sums::kFloat) {
                ptx::mma_m16n8k32_e4m3(sum, probabilities[m][step], v[step][half * 2], v[step][half * 2 + 1]);
              } else {
                ptx::mma_m16n8k32_e4m3(packed_sum, probabilities[m][step], v[step][half * 2], v[step][half * 2 + 1]);
              }
            }
            if constexpr (Config::kSums == Sums::kHalf) unpack<__half>(sum, packed_sum);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) state.out[m][pair * 2 + half][j] += sum[j] * (j % 2 == 0 ? scale.x : scale.y);
        }
      }
    }
  }
}

}  // namespace sage
