// Where a vector, 16 bytes of a row, lies in a tile of shared memory. The exclusive or spreads eight rows' vectors over all
// banks; it is the hardware's own pattern too (128-byte and 64-byte swizzle of the tensor cores' descriptors). Tiles start
// on 1024 bytes, so an even number of vectors further along the row is `address ^ (vectors * 16)`.
#pragma once

namespace sage {

template <int RowBytes>
__device__ __forceinline__ int swizzled(int row, int vector) {
  constexpr int kRowsPerLine = RowBytes >= 128 ? 1 : 128 / RowBytes;
  constexpr int kVectorMask = (RowBytes >= 128 ? 8 : RowBytes / 16) - 1;
  return row * RowBytes + ((vector ^ ((row / kRowsPerLine) & kVectorMask)) * 16);
}

// The same in a tile of Rows rows whose rows are wider than the swizzle's span: it is cut into panels of 128 bytes a row.
template <int RowBytes, int Rows>
__device__ __forceinline__ int swizzled_in_panels(int row, int vector) {
  if constexpr (RowBytes <= 128) {
    return swizzled<RowBytes>(row, vector);
  } else {
    return vector / 8 * (Rows * 128) + swizzled<128>(row, vector % 8);
  }
}

}  // namespace sage
