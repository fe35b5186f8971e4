// Q to INT8.
#pragma once

#include "kernels/attention/mma_sync/scores.cuh"
#include "kernels/attention/quad.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/rotate.cuh"

namespace sage {

// What Q's channels are multiplied by before they are rotated, as K was; null: neither.
template <int HeadDim>
__device__ __forceinline__ const float* factors_of(const AttentionParams& p, int64_t kv_mean) {
  return p.rotated != nullptr && p.rotated[kv_mean] != 0 ? p.q_factor + kv_mean * HeadDim : nullptr;
}

// Quantises the warp's rows of Q straight into mma A fragments, one scale a row (in shared memory: the main loop has no
// register to spare). Q is the caller's, and is read before what kernels before have written is waited for:
// K's mean, factors, and all that is read from here on.
template <typename Config>
__device__ __forceinline__ void quantise_q(const AttentionParams& p, const Tile& tile, Queries<Config>& q, float* q_scale) {
  constexpr int kPieces = Config::kQkSteps * 2;  // of 4 channels, every 16 channels
  const int lane = threadIdx.x % 32;
  const int first_row = tile.first_row + threadIdx.x / 32 * Config::kWarpM;
  uint32_t bits[Config::kRows][kPieces][2];
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const int token = min(first_row + row * 8 + lane / 4, tile.qo_len - 1);
    const auto* source = row_pointer<typename Config::Element>(p.q, tile.batch, tile.head, tile.q_token + token);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_channels<4>(bits[row][i], source, i * 16 + lane % 4 * 4, p.head_dim, p.q.aligned16);
    }
  }
  ptx::grid_dependency_wait();
  const float* factors = factors_of<Config::kHeadDim>(p, tile.kv_mean);
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const int token = first_row + row * 8 + lane / 4;
    float x[kPieces][4];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      unpack<typename Config::Element>(x[i], bits[row][i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = __fmul_rn(x[i][j], p.scale_log2);
    }
    if (p.lse != nullptr && p.k_mean != nullptr) {
      // Smoothing took q . mean(K) off every score of this row; log-sum-exp gets it back at the end.
      const float* mean = p.k_mean + tile.kv_mean * Config::kHeadDim + lane % 4 * 4;
      float shift = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) shift += x[i][j] * mean[i * 16 + j];
      }
      shift = sum_of_quad(shift);
      if (lane % 4 == 0 && token < tile.qo_len) p.lse[tile.lse + token] = shift;
    }

    if (factors != nullptr) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 by = *reinterpret_cast<const float4*>(factors + i * 16 + lane % 4 * 4);
        x[i][0] *= by.x;
        x[i][1] *= by.y;
        x[i][2] *= by.z;
        x[i][3] *= by.w;
      }
      rotate_own(reinterpret_cast<float(&)[kPieces * 4]>(x));
    }
    float magnitude = kSmallestMagnitude;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) magnitude = ptx::max_nan(magnitude, fabsf(x[i][j]));
    }
    magnitude = reduce_quad(magnitude, ptx::max_nan);
    const float inverse = 127.0f / magnitude;
    if (lane % 4 == 0) {
      q_scale[threadIdx.x / 32 * Config::kWarpM + row * 8 + lane / 4] =
          scale_of(magnitude, factors == nullptr ? 1.0f / 127.0f : QuantKInt8::q_unit(Config::kHeadDim) / 127.0f);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // Fragment register: bit 0 chooses row + 8, bit 1 the upper 16 channels of the step.
      q[row / 2][i / 2][row % 2 + i % 2 * 2] = pack_s8x4(x[i], inverse);
    }
  }
}

}  // namespace sage
