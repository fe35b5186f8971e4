// Hopper's attention kernel: Q to INT8.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/rotate.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// Quantises this warp's 16 rows of Q straight into A fragments, one scale a row: four lanes hold a row. `first_row` is the warpgroup's. Rotated: after factors
// of channels, as K was.
template <bool Masked, bool Rotated>
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
  // Where it is rarely run, in a loop, since instructions cost time where they lie between those that are: the row at hand has its bits first and
  // its results last.
  constexpr int kAtOnce = Rotated && Config::kKeepQ ? 1 : 2;
#pragma unroll kAtOnce
  for (int row = 0; row < 2; ++row) {
    const int block_row = warp_row + row * 8 + lane / 4;
    float rotated[kPieces * 4];
    float magnitude = kSmallestMagnitude;
    if constexpr (Rotated) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float x[4];
        unpack<Config::Element>(x, bits[0][i]);
        const float4 by = *reinterpret_cast<const float4*>(p.q_factor + work.kv_mean * Config::kHeadDim + i * 16 + channel);
        rotated[i * 4] = x[0] * by.x;
        rotated[i * 4 + 1] = x[1] * by.y;
        rotated[i * 4 + 2] = x[2] * by.z;
        rotated[i * 4 + 3] = x[3] * by.w;
      }
      rotate_own(rotated);
#pragma unroll
      for (int i = 0; i < kPieces * 4; ++i) magnitude = ptx::max_nan(magnitude, fabsf(rotated[i]));
      magnitude = reduce_quad(magnitude, ptx::max_nan);
    } else {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        largest = P::larger_magnitude(P::larger_magnitude(largest, bits[0][i][0]), bits[0][i][1]);
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
      if constexpr (Rotated) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = rotated[i * 4 + j];
      } else {
        unpack<Config::Element>(x, bits[0][i]);
      }
      const uint32_t packed = pack_s8x4(x, inverse);
      square = __dp4a(static_cast<int>(packed), static_cast<int>(packed), square);
      q[i / 2][i % 2 * 2] = q[i / 2][i % 2 * 2 + 1];
      q[i / 2][i % 2 * 2 + 1] = packed;
    }
    square = sum_of_quad(square);
    rows.q_scale[0] = rows.q_scale[1];
    rows.q_scale[1] = scale_of(magnitude, fabsf(p.scale_log2) * ((Rotated ? QuantKInt8::q_unit(Config::kHeadDim) : 1.0f) / 127.0f));
    if constexpr (Masked || Rotated) shared.at<float>(Shared::kQScale)[block_row] = rows.q_scale[1];
    shared.at<float>(Shared::kQReach)[block_row] = ptx::rcp(rows.q_scale[1] * ptx::sqrt(static_cast<float>(square)));
    // Smoothing took q . mean(K) off every score of this row; log-sum-exp gets it back at the end. Where Q is quantised once more it is there already. (Of wider heads
    // it is found again: without that, one kernel would have stack.)
    constexpr bool kHasShift = Rotated && Config::kKeepQ;
    if (!kHasShift && p.lse != nullptr) {
      // Stored for every call it costs packed sequences a hundredth of their time.
      if constexpr (!Masked && !Rotated) shared.at<float>(Shared::kQScale)[block_row] = rows.q_scale[1];
      float shift = 0.0f;
      if (p.k_mean != nullptr) {
        const float* mean = p.k_mean + work.kv_mean * Config::kHeadDim + channel;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          float x[4];
          unpack<Config::Element>(x, bits[0][i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) shift += x[j] * mean[i * 16 + j];
        }
      }
      shift = sum_of_quad(shift);
      if (lane % 4 == 0) shared.at<float>(Shared::kQShift)[block_row] = shift * p.scale_log2;  // for itself
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      bits[0][i][0] = bits[1][i][0];
      bits[0][i][1] = bits[1][i][1];
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
