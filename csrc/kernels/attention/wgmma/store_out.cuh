// Hopper's attention kernel: the output to global memory.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/attention/wgmma/stage_panel.cuh"
#include "kernels/swizzle.cuh"
#include "kernels/transpose.cuh"

namespace sage {

// Writes this warp's 16 rows, the first of which is `first_row`. Staged: by way of shared memory, which takes fewer instructions than handing channels
// from lane to lane; under a mask there is no room for it at head_dim 128.
template <bool Staged>
__device__ __forceinline__ void store_out(const Config::Params& p, const Work& work, int first_row, int warp_row, const Rows& rows,
                                          const Output& out, const Memory& shared) {
  const int lane = threadIdx.x % 32;
  float inverse[2];
  const auto pair = [&](int group, int row, float factor) {  // of a group of 8 channels
    const int i = group * 4 + row * 2;
    return Pair<Config::Element>::pack(out[i] * factor, out[i + 1] * factor);
  };
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int token = first_row + lane / 4 + row * 8;
    const bool inside = token < work.qo_len;
    const float sum = sum_of_quad(rows.sum[row]);
    // A row that sees no key is zero.
    inverse[row] = sum == 0.0f ? 0.0f : ptx::rcp(sum);
    if (p.lse != nullptr && lane % 4 == 0 && inside) p.lse[work.lse + token] = log_sum_exp(row, sum, rows, shared);
    if constexpr (!Staged) {
      auto* destination = row_pointer<uint16_t>(p.out, work.batch, work.head, work.q_token + token);
#pragma unroll
      for (int group = 0; group < Config::kHeadDim / 32; ++group) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = pair(group * 4 + i, row, inverse[row]);
        const uint4 eight = transpose<1>(pairs, lane % 4);  // channels of one group, of which each lane had a pair
        const int channel = (group * 4 + lane % 4) * 8;
        // Channels come in eights: the copy engine reads no other V.
        if (inside && channel < p.v_head_dim) *reinterpret_cast<uint4*>(destination + channel) = eight;
      }
    }
  }
  if constexpr (Staged) {  // as store_rows.cuh does: of one function for all of it nvcc makes other, slower code here
    const int stage = Shared::kOut + warp_row / 16 * Config::kOutBytes;
    const int first = lane / 8, channel = lane % 8 * 8;  // of rows four apart
    const int rows_left = work.qo_len - first_row;
    auto* destination = row_pointer<uint16_t>(p.out, work.batch, work.head, work.q_token + first_row) + first * p.out.token_stride + channel;
    const uint32_t place = shared.address + stage + swizzled<128>(lane % 16, lane / 16);
#pragma unroll
    for (int panel = 0; panel < Config::kHeadDim / 64; ++panel) {
      __syncwarp();
      stage_panel(panel, place, [&](int group, int row) { return pair(group, row, inverse[row]); });
      __syncwarp();
      uint4 eights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) eights[i] = *shared.at<uint4>(stage + swizzled<128>(first + i * 4, channel / 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i * 4 < rows_left && panel * 64 + channel < p.v_head_dim) {
          __stcg(reinterpret_cast<uint4*>(destination + i * 4 * p.out.token_stride + panel * 64), eights[i]);
        }
      }
    }
  }
}

}  // namespace sage
