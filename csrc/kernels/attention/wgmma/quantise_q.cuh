// Hopper's attention kernel: Q to INT8.
#pragma once

#include "kernels/attention/wgmma/config.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// Quantises this warp's 16 rows of Q, one scale a row: half a warp reads a row at a time.
__device__ __forceinline__ void quantise_q(const Config::Params& p, const Work& work, int warp_row, const Memory& shared) {
  constexpr int kChannels = Config::kHeadDim / 16;
  const int lane = threadIdx.x % 32;
  const int channel = lane % 16 * kChannels;
  constexpr int kBatch = 32 / kChannels;  // passes whose loads are in flight together
#pragma unroll 1
  for (int batch = 0; batch < 8; batch += kBatch) {
    uint32_t bits[kBatch][kChannels / 2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = warp_row + (batch + i) * 2 + lane / 16;
      if constexpr (Config::kPrefetchQ) {
        const auto* q = shared.at<Config::Element>(Shared::kQ) + row * Config::kHeadDim;
        load_channels<kChannels>(bits[i], q, channel, Config::kHeadDim, true);
      } else {
        const auto* q = row_pointer<Config::Element>(p.q, work.batch, work.head, work.q_token + min(work.first_row + row, work.qo_len - 1));
        load_channels<kChannels>(bits[i], q, channel, p.head_dim, p.q.aligned16);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = warp_row + (batch + i) * 2 + lane / 16;
      float x[kChannels];
      unpack<Config::Element>(x, bits[i]);
      float magnitude = 1e-14f;  // keeps the scale of an all-zero row positive
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        x[j] = __fmul_rn(x[j], p.scale_log2);
        magnitude = ptx::max_nan(magnitude, fabsf(x[j]));
      }
#pragma unroll
      for (int other = 8; other > 0; other /= 2) {
        magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, other));
      }
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
        if (lane % 16 == 0) shared.at<float>(Shared::kQShift)[row] = shift;
      }
      const float inverse = __fdividef(127.0f, magnitude);
      int square = 0;
      uint8_t* destination = shared.at<uint8_t>(Shared::kQInt8) + 
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
        shared.at<float>(Shared::kQScale)[row] = magnitude * (1.0f / 127.0f);
        shared.at<float>(Shared::kQBound)[row] = magnitude * (1.0f / 127.0f) * sqrtf(static_cast<float>(square));
      }
    }
  }
  ptx::proxy_async_fence();
}

}  // namespace sage
