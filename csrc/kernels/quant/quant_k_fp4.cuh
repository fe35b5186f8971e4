// K -> e2m1, less its mean, with a scale for each 16 channels of a key and a unit for a block of 64 keys. K is read once: the same registers are
// then multiplied by Q's means (mean_scores.cuh).
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/quant/fp4.cuh"
#include "kernels/quant/mean_scores.cuh"
#include "kernels/quant/quant_k_fp4.h"
#include "kernels/swizzle.cuh"

namespace sage {

// Quantises a warp's keys.
template <typename Config>
__device__ __forceinline__ void quantise(const typename Config::Params& p, const KvSpan& span, KeysOfWarp<Config>& keys,
                                         const MeanOfKeys<Config>& mean_of_keys) {
  constexpr int kWarps = Config::kThreads / 64;  // of a block of 64 keys
  __shared__ float magnitudes[2][kWarps];
  const int lane = threadIdx.x % 32, block = threadIdx.x / 32 / kWarps, warp = threadIdx.x / 32 % kWarps;

  // Less the mean. Halves, since the difference of two large keys need not be a number.
  const auto difference = [&](float(&x)[8], int piece, int n) {
    const uint4 words = mean_of_keys.load(piece);
    const uint32_t bits[4] = {words.x, words.y, words.z, words.w};
    float mean[8];
    unpack<typename Config::Element>(mean, bits);
    unpack<typename Config::Element>(x, keys.bits[piece][n]);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = keys.counts >> n & 1 ? x[i] * 0.5f - mean[i] * 0.5f : 0.0f;
  };
  float magnitude = Fp4::kSmallest;
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) {
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) {
      float x[8];
      difference(x, piece, n);
#pragma unroll
      for (int i = 0; i < 8; ++i) magnitude = larger_finite(magnitude, x[i]);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lanes));
  if (lane == 0) magnitudes[block][warp] = magnitude;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) magnitude = fmaxf(magnitude, magnitudes[block][i]);
  keys.keep();  // and not the differences, for which there are no registers

  const float inverse = Fp4::kLargest / magnitude;
  uint8_t* out = p.k_fp4 + (span.index * 2 + block) * Fp4::k_block(Config::kHeadDim);
  uint8_t* scales = out + Fp4::code_bytes(Config::kHeadDim);
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) {
    const int channel = Config::channel(piece);
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) {
      const int to = warp * Config::kKeys + n * 8 + lane / 4;
      float x[8], scale[1];
      difference(x, piece, n);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= inverse;
      const uint32_t codes = quantise_fp4(x, OfTwoLanes{}, scale);
      *reinterpret_cast<uint32_t*>(out + swizzled<Config::kHeadDim / 2>(to, channel / 32) + channel / 2 % 16) = codes;
      if (lane % 2 == 0) {
        scales[to * (Config::kHeadDim / Fp4::kGroup) + channel / Fp4::kGroup] = ptx::pack_e4m3x2(scale[0], 0.0f);
      }
    }
  }
  if (lane == 0 && warp == 0) *reinterpret_cast<float*>(scales + Fp4::group_scale_bytes(Config::kHeadDim)) = scale_of(magnitude, 2.0f / Fp4::kLargest);
}

// A span by a block of threads, of which those for this part of the products start with `first_block`; the first part quantises. The means are another
// kernel's, for which all wait, with their keys on the way.
template <typename Config>
__device__ __forceinline__ void quantise_k_fp4(const typename Config::Params& p, int first_block, int part) {
  __shared__ MeanOfKeys<Config> mean_of_keys;
  ptx::grid_dependency_launch();
  const KvSpan span(p, first_block);
  if (span.first_key >= span.length) {
    ptx::grid_dependency_wait();
    return;
  }
  KeysOfWarp<Config> keys(p, span);
  ptx::grid_dependency_wait();
  mean_of_keys.fetch(p, span);
  keys.drop_others();
  if (part == 0) quantise<Config>(p, span, keys, mean_of_keys);
  score_means<Config>(p, span, keys, mean_of_keys, part);
}

}  // namespace sage
