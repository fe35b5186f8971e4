// Where a 16-byte chunk of a row lies in a tile of shared memory. The exclusive or spreads eight rows' chunks over all
// banks; it is the hardware's own pattern too (128-byte and 64-byte swizzle of the tensor cores' descriptors). Tiles start
// on 1024 bytes, so an even number of chunks further along the row is `address ^ (chunks * 16)`.
#pragma once

namespace sage {

template <int RowBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kRowsPerLine = RowBytes >= 128 ? 1 : 128 / RowBytes;
  constexpr int kChunkMask = (RowBytes >= 128 ? 8 : RowBytes / 16) - 1;
  return row * RowBytes + ((chunk ^ ((row / kRowsPerLine) & kChunkMask)) * 16);
}

}  // namespace sage
