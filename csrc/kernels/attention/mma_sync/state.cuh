// What a warp keeps while it goes through the keys: the output, the rows' bases and sums, and the probabilities of the keys at hand.
#pragma once

#include "kernels/attention/mma_sync/scores.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/float8.cuh"
#include "kernels/ptx/shared.cuh"

namespace sage {

template <typename Config>
using Probabilities = uint32_t[Config::kMFragments][Config::kPvSteps][4];  // A fragments

// What a lane keeps of its rows.
template <typename Config>
struct State {
  float out[Config::kMFragments][Config::kOFragments][4];
  // In log2 units: what probabilities are relative to. The row's largest score less kLevel when it was last renewed.
  float base[Config::kRows];
  float sum[Config::kRows];  // this lane's columns only
};

// What is the same for all chunks of a block of keys.
template <typename Config>
struct KeyBlock {
  int index;
  float scale[Config::kRows];  // of scores
  Hidden hidden;
  bool unsmoothed;  // V, though others are smoothed
};

// Of the scales of a lane's rows the largest.
template <typename Config>
__device__ __forceinline__ float coarsest(const KeyBlock<Config>& block) {
  float largest = block.scale[0];
#pragma unroll
  for (int row = 1; row < Config::kRows; ++row) largest = fmaxf(largest, block.scale[row]);
  return largest;
}

// Where this lane keeps how much of a row's sum fell on blocks whose V was not smoothed: the others' share of the mean is due in the end.
template <typename Config>
__device__ __forceinline__ uint32_t unsmoothed_sum(uint32_t shared, int row) {
  return shared + Config::kUnsmoothedOffset + (row * Config::kThreads + threadIdx.x) * 4;
}

// Multiplies what has been added up relative to a row's base, which falls by log2(factor).
template <typename Config>
__device__ __forceinline__ void rescale_state(const AttentionParams& p, uint32_t shared, int row, float factor, State<Config>& state) {
  state.sum[row] *= factor;
#pragma unroll
  for (int d = 0; d < Config::kOFragments; ++d) {
    state.out[row / 2][d][row % 2 * 2] *= factor;
    state.out[row / 2][d][row % 2 * 2 + 1] *= factor;
  }
  if constexpr (Config::kSmooths) {
    if (p.v_mean != nullptr) {
      const uint32_t unsmoothed = unsmoothed_sum<Config>(shared, row);
      ptx::store_shared_float(unsmoothed, ptx::load_shared_float(unsmoothed) * factor);
    }
  }
}

// Where they have those of a row and 16 keys, the group-th of those gathered: in 8 bits all four of a lane.
template <typename Config>
__device__ __forceinline__ auto& packed(Probabilities<Config>& probabilities, int row, int group) {
  static_assert(Config::kValues == Values::kE4m3);
  return probabilities[row / 2][group / 2][row % 2 + group % 2 * 2];
}

// Probabilities of a row and 16 keys.
template <typename Config>
__device__ __forceinline__ void pack(Probabilities<Config>& probabilities, int row, int group, const float (&x)[4]) {
  // The C fragments of two groups of 8 keys are the A fragment of a 16-key step. In 8 bits those of four are that of a 32-key step,
  // if in each 16 keys V's are taken in the order 0 1 8 9, 2 3 10 11, ...
  if constexpr (Config::kValues != Values::kE4m3) {
    probabilities[row / 2][group][row % 2] = Pair<typename Config::ProbabilityType>::pack(x[0], x[1]);
    probabilities[row / 2][group][row % 2 + 2] = Pair<typename Config::ProbabilityType>::pack(x[2], x[3]);
  } else {
    packed<Config>(probabilities, row, group) = ptx::pack_e4m3x4(x[0], x[1], x[2], x[3]);
  }
}

__device__ __forceinline__ void unpack_e4m3(float (&x)[4], uint32_t bits) {
  uint32_t pairs[2];
  ptx::unpack_e4m3x4(pairs[0], pairs[1], bits);
  unpack<__half>(x, pairs);
}

// Multiplies what pack() packed: where the row's base has grown since.
template <typename Config>
__device__ __forceinline__ void rescale_packed(Probabilities<Config>& probabilities, int row, int group, float factor) {
  if constexpr (Config::kValues == Values::kF16) {
    const __half2 factors = __float2half2_rn(factor);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto& pair = reinterpret_cast<__half2&>(probabilities[row / 2][group][row % 2 + i * 2]);
      pair = __hmul2(pair, factors);
    }
  } else {
    uint32_t& bits = packed<Config>(probabilities, row, group);
    float x[4];
    unpack_e4m3(x, bits);
    bits = ptx::pack_e4m3x4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
  }
}

}  // namespace sage
