// Hopper's attention kernel: Q to INT8.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// Quantises this warp's 16 rows of Q straight into A fragments, one scale a row: four lanes hold a row. `first_row` is the warpgroup's. Scaled: by factors
// of channels, which undo what K was divided by.
template <bool Masked, bool Scaled>
__device__ __forceinline__ void quantise_q(const Config::Params& p, const Work& work, int first_row, int warp_row, const Memory& shared,
                                           Queries& q, Rows& rows) {
  using P = Pair<Config::Element>;
  __syncwarp();  // before what other lanes read of the last tile's rows is overwritten
  constexpr int kPieces = Config::kHeadDim / 16;  // of 4 channels: of every 16
  const int lane = threadIdx.x % 32;
  const int channel = lane % 4 * 4;
  uint32_t bits[2][kPieces][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int block_row = warp_row + row * 8 + lane / 4;
    if constexpr (Config::kKeepQ) {
      // Eight rows further the swizzle is the same.
      const int first = swizzled_in_panels<Config::kHeadDim * 2, Config::kBlockM>(warp_row + lane / 4, channel / 8) + channel % 8 * 2;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint2 piece = *shared.at<uint2>(Shared::kQ + (first ^ (i % 4 * 32)) + row * 8 * 128 + i / 4 * Shared::kQPanelBytes);
        bits[row][i][0] = piece.x;
        bits[row][i][1] = piece.y;
      }
    } else {
      const int64_t token = work.q_token + min(first_row + block_row % 64, work.qo_len - 1);
      const auto* source = row_pointer<Config::Element>(p.q, work.batch, work.head, token);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) load_channels<4>(bits[row][i], source, i * 16 + channel, p.head_dim, true);
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int block_row = warp_row + row * 8 + lane / 4;
    const auto scaled = [&](float(&x)[4], int i) {
      unpack<Config::Element>(x, bits[row][i]);
      if constexpr (Scaled) {
        const float4 by = *reinterpret_cast<const float4*>(p.q_factor + work.kv_mean * Config::kHeadDim + i * 16 + channel);
        x[0] *= by.x;
        x[1] *= by.y;
        x[2] *= by.z;
        x[3] *= by.w;
      }
    };
    float magnitude = 1e-14f;  // positive, so that the scale of zeros is
    if constexpr (Scaled) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float x[4];
        scaled(x, i);
#pragma unroll
        for (int j = 0; j < 4; ++j) magnitude = ptx::max_nan(magnitude, fabsf(x[j]));
      }
      magnitude = reduce_quad(magnitude, ptx::max_nan);
    } else {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        largest = P::larger_magnitude(P::larger_magnitude(largest, bits[row][i][0]), bits[row][i][1]);
      }
      const float2 pair = P::unpack(reduce_quad(largest, P::larger_magnitude));
      magnitude = ptx::max_nan(magnitude, ptx::max_nan(pair.x, pair.y));
    }
    // A negative sm_scale turns Q's signs: scales are not negative.
    const float inverse = ptx::divide(copysignf(127.0f, p.scale_log2), magnitude);
    int square = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float x[4];
      scaled(x, i);
      const uint32_t packed = pack_s8x4(x, inverse);
      square = __dp4a(static_cast<int>(packed), static_cast<int>(packed), square);
      q[i / 2][row + i % 2 * 2] = packed;
    }
    square = sum_of_quad(square);
    rows.q_scale[row] = scale_of(magnitude, fabsf(p.scale_log2) * ((Scaled ? QuantKInt8::kQUnit : 1.0f) / 127.0f));
    if constexpr (Masked) shared.at<float>(Shared::kQScale)[block_row] = rows.q_scale[row];
    shared.at<float>(Shared::kQReach)[block_row] = ptx::rcp(rows.q_scale[row] * ptx::sqrt(static_cast<float>(square)));
    if (p.lse != nullptr) {
      // Smoothing took q . mean(K) off every score of this row; log-sum-exp gets it back at the end.
      float shift = 0.0f;
      if (p.k_mean != nullptr) {
        const float* mean = p.k_mean + work.kv_mean * Config::kHeadDim + channel;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          float x[4];
          unpack<Config::Element>(x, bits[row][i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) shift += x[j] * mean[i * 16 + j];
        }
      }
      shift = sum_of_quad(shift);
      if (lane % 4 == 0) shared.at<float>(Shared::kQShift)[block_row] = shift * p.scale_log2;  // for itself
    }
  }
  __syncwarp();
}

// Puts the fragments where wgmma finds them in shared memory: where there are no registers to keep them.
__device__ __forceinline__ void store_queries(const Queries& q, int warp_row, const Memory& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < Config::kQkSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + lane / 4 + i % 2 * 8;
      const int offset = swizzled_in_panels<Config::kHeadDim, Config::kBlockM>(row, step * 2 + i / 2) + lane % 4 * 4;
      *shared.at<uint32_t>(Shared::kQInt8 + offset) = q[step][i];
    }
  }
}

}  // namespace sage
