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

// The same in a tile of Rows rows whose rows are wider than the swizzle's span: it is cut into panels of 128 bytes a row.
template <int RowBytes, int Rows>
__device__ __forceinline__ int swizzled_in_panels(int row, int chunk) {
  if constexpr (RowBytes <= 128) {
    return swizzled<RowBytes>(row, chunk);
  } else {
    return chunk / 8 * (Rows * 128) + swizzled<128>(row, chunk % 8);
  }
}

}  // namespace sage
