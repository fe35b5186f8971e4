// Rows of the output from a warp's registers to global memory, of Hopper's attention kernels.
#pragma once

#include "kernels/attention/wgmma/stage_panel.cuh"
#include "kernels/element.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// Writes a warp's 16 rows, of which `rows_left` are the caller's, each times its `factor`, by way of 2 KiB of shared memory that are the warp's own: fewer
// instructions than handing channels from lane to lane. `destination` is the first row's; a row has `channels`, in eights.
template <typename Element, int HeadDim>
__device__ __forceinline__ void store_rows(const float (&out)[HeadDim / 2], const float (&factor)[2], uint16_t* destination, int64_t token_stride,
                                           int rows_left, int channels, uint8_t* stage, uint32_t stage_address) {
  const int lane = threadIdx.x % 32;
  const int first = lane / 8, channel = lane % 8 * 8;  // of rows four apart
  destination += first * token_stride + channel;
  const uint32_t place = stage_address + swizzled<128>(lane % 16, lane / 16);
#pragma unroll
  for (int panel = 0; panel < HeadDim / 64; ++panel) {
    __syncwarp();
    stage_panel(panel, place, [&](int group, int row) {
      const int at = group * 4 + row * 2;
      return Pair<Element>::pack(out[at] * factor[row], out[at + 1] * factor[row]);
    });
    __syncwarp();
    uint4 eights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) eights[i] = *reinterpret_cast<const uint4*>(stage + swizzled<128>(first + i * 4, channel / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i * 4 < rows_left && panel * 64 + channel < channels) {
        __stcg(reinterpret_cast<uint4*>(destination + i * 4 * token_stride + panel * 64), eights[i]);
      }
    }
  }
}

}  // namespace sage
