// Hopper's attention kernel: Q to INT8.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// Quantises this warp's 16 rows of Q, one scale a row: half a warp reads a row at a time.
__device__ __forceinline__ void quantise_q(const Config::Params& p, const Work& work, int warp_row, const Memory& shared) {
  using P = Pair<Config::Element>;
  constexpr int kChannels = Config::kHeadDim / 16;
  constexpr int kBatch = kChannels <= 8 ? 8 : 4;  // passes side by side: each is a chain of shuffles
  const int lane = threadIdx.x % 32;
  const int channel = lane % 16 * kChannels;
#pragma unroll 1
  for (int batch = 0; batch < 8; batch += kBatch) {
    uint32_t bits[kBatch][kChannels / 2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = warp_row + (batch + i) * 2 + lane / 16;
      if constexpr (Config::kPrefetchQ) {
        load_channels<kChannels>(bits[i], shared.at<Config::Element>(Shared::kQ) + row * Config::kHeadDim, channel,
                                 Config::kHeadDim, true);
      } else {
        const int64_t token = work.q_token + min(work.first_row + row, work.qo_len - 1);
        load_channels<kChannels>(bits[i], row_pointer<Config::Element>(p.q, work.batch, work.head, token), channel,
                                 p.head_dim, true);
      }
    }
    float magnitude[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kChannels / 2; ++j) largest = P::larger_magnitude(largest, bits[i][j]);
#pragma unroll
      for (int other = 8; other > 0; other /= 2) {
        largest = P::larger_magnitude(largest, __shfl_xor_sync(0xffffffffu, largest, other));
      }
      const float2 pair = P::unpack(largest);
      // Positive, so that the scale of zeros is.
      magnitude[i] = ptx::max_nan(1e-14f, ptx::max_nan(pair.x, pair.y));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = warp_row + (batch + i) * 2 + lane / 16;
      float x[kChannels];
      unpack<Config::Element>(x, bits[i]);
      if (p.lse != nullptr) {
        // Smoothing took q . mean(K) off every score of this row; log-sum-exp gets it back at the end.
        float shift = 0.0f;
        if (p.k_mean != nullptr) {
          const float* mean = p.k_mean + work.kv_mean * Config::kHeadDim + channel;
#pragma unroll
          for (int j = 0; j < kChannels; ++j) shift += x[j] * mean[j];
        }
#pragma unroll
        for (int other = 8; other > 0; other /= 2) shift += __shfl_xor_sync(0xffffffffu, shift, other);
        if (lane % 16 == 0) shared.at<float>(Shared::kQShift)[row] = shift * p.scale_log2;
      }
      // A negative sm_scale turns Q's signs: scales are not negative.
      const float inverse = __fdividef(copysignf(127.0f, p.scale_log2), magnitude[i]);
      int square = 0;
      auto* destination = shared.at<uint8_t>(Shared::kQInt8) +
                          swizzled_in_panels<Config::kHeadDim, Config::kBlockM>(row, channel / 16) + channel % 16;
#pragma unroll
      for (int j = 0; j < kChannels; j += 4) {
        const uint32_t packed = pack_s8x4({x[j], x[j + 1], x[j + 2], x[j + 3]}, inverse);
        square = __dp4a(static_cast<int>(packed), static_cast<int>(packed), square);
        *reinterpret_cast<uint32_t*>(destination + j) = packed;
      }
#pragma unroll
      for (int other = 8; other > 0; other /= 2) square += __shfl_xor_sync(0xffffffffu, square, other);
      if (lane % 16 == 0) {
        const float scale = magnitude[i] * (fabsf(p.scale_log2) / 127.0f);
        shared.at<float>(Shared::kQScale)[row] = scale;
        shared.at<float>(Shared::kQBound)[row] = scale * sqrtf(static_cast<float>(square));
      }
    }
  }
  __syncwarp();
}

// This warp's rows as A fragments.
__device__ __forceinline__ void load_queries(const Memory& shared, int warp_row, Queries& q) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < Config::kQkSteps; ++step) {
    // Matrices of 8 rows x 16 bytes: rows 0-7 and 8-15 of the first half of the step's channels, then of the second.
    const int offset = swizzled_in_panels<Config::kHeadDim, Config::kBlockM>(warp_row + lane % 16, step * 2 + lane / 16);
    ptx::ldmatrix_x4(q[step], shared.address + Shared::kQInt8 + offset);
  }
  __syncwarp();
}

}  // namespace sage
