// Hopper's attention kernel: the output of packed sequences to global memory.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/attention/wgmma/stage_panel.cuh"
#include "kernels/ptx/global.cuh"
#include "kernels/ptx/shared.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// What store_out does, by way of shared memory, without a branch before the last row is stored: all that a row's store waits for is on its way together. It takes
// 2% less of a call of packed sequences; of others it would take up to 3% more (bench/notes-hopper.md).
__device__ __forceinline__ void store_packed(const Config::Params& p, const Work& work, int first_row, int warp_row, const Rows& rows,
                                             const Output& out, const Memory& shared) {
  const int lane = threadIdx.x % 32;
  const float sums[2] = {sum_of_quad(rows.sum[0]), sum_of_quad(rows.sum[1])};
  // A row that sees no key is zero.
  float inverse[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) inverse[row] = sums[row] == 0.0f ? 0.0f : ptx::rcp(sums[row]);
  const auto pair = [&](int group, int row) {  // of a group of 8 channels
    const int i = group * 4 + row * 2;
    return Pair<Config::Element>::pack(out[i] * inverse[row], out[i + 1] * inverse[row]);
  };
  const uint32_t stage = shared.address + Shared::kOut + warp_row / 16 * Config::kOutBytes;
  const int first = lane / 8, channel = lane % 8 * 8;  // of rows four apart
  const int rows_left = work.qo_len - first_row;
  uint16_t* destination[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    destination[i] = row_pointer<uint16_t>(p.out, work.batch, work.head, work.q_token + first_row) + (first + i * 4) * p.out.token_stride + channel;
  }
  const uint32_t place = stage + swizzled<128>(lane % 16, lane / 16);
#pragma unroll
  for (int panel = 0; panel < Config::kHeadDim / 64; ++panel) {
    __syncwarp();
    stage_panel(panel, place, pair);
    __syncwarp();
    uint32_t eights[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::load_shared_words(eights[i], stage + swizzled<128>(first + i * 4, channel / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_words_if(first + i * 4 < rows_left && panel * 64 + channel < p.v_head_dim, destination[i] + panel * 64, eights[i]);
    }
  }
  if (p.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int token = first_row + lane / 4 + row * 8;
    if (token < work.qo_len) p.lse[work.lse + token] = log_sum_exp(row, sums[row], rows, shared);
  }
}

}  // namespace sage
