// Which keys are seen by some tile of a mask. A warp adds up what mask_tiles found in all tiles of the same 64 keys.
#include "kernels/mask/seen_keys.h"

#include "kernels/ptx/grid.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(SeenKeys::kThreads) seen_keys(const __grid_constant__ SeenKeys::Params p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int lane = threadIdx.x % 32, index = blockIdx.x * SeenKeys::kTilesOfBlock + threadIdx.x / 32;
  if (index >= p.count) return;
  const int batch = index / p.tiles, tile = index % p.tiles;
  const uint4* parts = reinterpret_cast<const uint4*>(p.parts) + int64_t{batch} * p.parts_of_batch * p.tiles + tile;
  uint32_t words[SeenKeys::kWords] = {};
#pragma unroll 4
  for (int i = lane; i < p.parts_of_batch; i += 32) {
    const uint4 part = parts[int64_t{i} * p.tiles];
    words[0] |= part.x, words[1] |= part.y, words[2] |= part.z, words[3] |= part.w;
  }
#pragma unroll
  for (int i = 0; i < SeenKeys::kWords; ++i) {
    const uint32_t word = __reduce_or_sync(0xffffffffu, words[i]);
    if (lane == i) p.words[int64_t{index} * SeenKeys::kWords + i] = word;
  }
}

}  // namespace sage
