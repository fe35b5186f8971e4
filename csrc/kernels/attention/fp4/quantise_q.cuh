// Q, less its mean, to FP4.
#pragma once

#include "kernels/attention/fp4/load.cuh"
#include "kernels/attention/fp4/scales.cuh"
#include "kernels/attention/quad.cuh"
#include "kernels/quant/fp4.cuh"

namespace sage {

// A fragments of the warp's rows and their scales.
struct Fp4Queries {
  uint32_t codes[Config::kMFragments][Config::kQkSteps][4];
  uint32_t scales[Config::kMFragments][Config::kQkSteps];
};

// Answers with the unit of all rows of the block of threads, sm_scale * log2(e) included. `magnitudes` has room for a float of each warp.
__device__ __forceinline__ float quantise_q_fp4(const Config::Params& p, const Fp4Tile& tile, const ScaleSpread& spread, float* magnitudes,
                                               Fp4Queries& q) {
  using Element = Config::Element;
  constexpr int kPieces = Config::kQkSteps * 2;  // of 8 channels, every 32 channels
  const int lane = threadIdx.x % 32;
  const int first_row = tile.first_row + threadIdx.x / 32 * Config::kWarpM;
  uint32_t bits[Config::kRows][kPieces][4];
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const int token = min(first_row + row * 8 + lane / 4, tile.qo_len - 1);
    const auto* source = row_pointer<Element>(p.q, tile.batch, tile.head, tile.q_token + token);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) load_channels<8>(bits[row][i], source, i * 32 + lane % 4 * 8, p.head_dim, p.q.aligned16);
  }
  const auto* mean = reinterpret_cast<const Element*>(p.q_mean) + tile.q_mean * Config::kHeadDim + lane % 4 * 8;
  const auto centred = [&](float(&x)[8], int row, int piece) {
    const uint4 words = *reinterpret_cast<const uint4*>(mean + piece * 32);
    const uint32_t mean_bits[4] = {words.x, words.y, words.z, words.w};
    float means[8];
    unpack<Element>(x, bits[row][piece]);
    unpack<Element>(means, mean_bits);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j] - means[j], p.scale_log2);
  };

  float magnitude = Fp4::kSmallest;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float x[8];
      centred(x, row, i);
#pragma unroll
      for (int j = 0; j < 8; ++j) magnitude = larger_finite(magnitude, x[j]);
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, other));
  if (lane == 0) magnitudes[threadIdx.x / 32] = magnitude;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Config::kThreads / 32; ++warp) magnitude = fmaxf(magnitude, magnitudes[warp]);
  const float inverse = Fp4::kLargest / magnitude;

#pragma unroll
  for (int m = 0; m < Config::kMFragments; ++m) {
#pragma unroll
    for (int step = 0; step < Config::kQkSteps; ++step) {
      float scales[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // the fragment's registers: bit 0 chooses row + 8, bit 1 the upper 32 channels of the step
        float x[8], scale[1];
        centred(x, 2 * m + i % 2, 2 * step + i / 2);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= inverse;
        q.codes[m][step][i] = quantise_fp4(x, OfTwoLanes{}, scale);
        scales[i] = scale[0];
      }
      q.scales[m][step] = spread(ptx::pack_e4m3x4(scales[0], scales[1], scales[2], scales[3]));
    }
  }

  if (p.lse != nullptr && p.k_mean != nullptr) {
    // Smoothing took q . mean(K) off every score of a row; log-sum-exp gets it back at the end.
    const float* k_mean = p.k_mean + tile.kv_mean * Config::kHeadDim + lane % 4 * 8;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      float shift = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float x[8];
        unpack<Element>(x, bits[row][i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) shift += x[j] * p.scale_log2 * k_mean[i * 32 + j];
      }
      shift = sum_of_quad(shift);
      const int token = first_row + row * 8 + lane / 4;
      if (lane % 4 == 0 && token < tile.qo_len) p.lse[tile.lse + token] = shift;
    }
  }
  return scale_of(magnitude, 1.0f / Fp4::kLargest);
}

}  // namespace sage
