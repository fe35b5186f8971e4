// A panel of a warp's output to shared memory, on its way to global memory.
#pragma once

#include "kernels/ptx/ldmatrix.cuh"

namespace sage {

// 64 channels of 16 rows. `pair_of(group, row)` are two channels of a group of 8, of this lane's row or the one eight further; `place` is swizzled<128>(lane % 16, lane / 16)
// of where they go.
template <typename PairOf>
__device__ __forceinline__ void stage_panel(int panel, uint32_t place, const PairOf& pair_of) {
  // Matrices of 8 rows and 8 channels: the first rows' and the others', then of the next channels.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = pair_of(panel * 8 + i * 2 + j / 2, j % 2);
    ptx::stmatrix_x4(place ^ i * 32, pairs);
  }
}

}  // namespace sage
