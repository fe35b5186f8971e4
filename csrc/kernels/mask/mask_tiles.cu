// Looks at an attention mask once, a block of threads a tile of 128 rows x 64 keys: attention then skips the tiles that hide
// everything and does not read those that change nothing.
#include "kernels/mask/mask_tiles.h"

#include "kernels/attention/mask_value.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(MaskTiles::kThreads)
    mask_tiles(const __grid_constant__ MaskTiles::Params p) {
  const int key_tiles = (p.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys;
  const int row_tiles = (p.rows + MaskTiles::kRows - 1) / MaskTiles::kRows;
  const int first_key = blockIdx.x % key_tiles * MaskTiles::kKeys;
  const int first_row = blockIdx.x / key_tiles % row_tiles * MaskTiles::kRows;
  const int batch_head = blockIdx.x / key_tiles / row_tiles;
  const auto* origin = static_cast<const uint8_t*>(p.mask.data) + batch_head / p.heads * p.mask.batch_stride +
                       batch_head % p.heads * p.mask.head_stride;
  const int rows = min(MaskTiles::kRows, p.rows - first_row);
  const int keys = min(MaskTiles::kKeys, p.keys - first_key);
  bool hides_all = true, changes_none = true;
  for (int row = threadIdx.x / 32; row < rows; row += MaskTiles::kThreads / 32) {
#pragma unroll
    for (int i = 0; i < MaskTiles::kKeys; i += 32) {
      const int key = i + threadIdx.x % 32;
      if (key < keys) {
        const float value =
            mask_value(p.mask.type, origin + (first_row + row) * p.mask.row_stride + (first_key + key) * p.mask.key_stride);
        hides_all = hides_all && value == -INFINITY;
        changes_none = changes_none && value == 0.0f;
      }
    }
  }
  hides_all = __syncthreads_and(hides_all);
  changes_none = __syncthreads_and(changes_none);
  if (threadIdx.x == 0) {
    p.tiles[blockIdx.x] = hides_all ? AttentionMask::kHidden : changes_none ? AttentionMask::kVisible : AttentionMask::kMixed;
  }
}

}  // namespace sage
