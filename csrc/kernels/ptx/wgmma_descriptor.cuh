// Descriptors of wgmma's operands (sm_90a).
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

// Where and how an operand lies in shared memory. Addresses in it are below 2^18, so that steps through it change the low word alone;
// above, an address says which block of the cluster is meant.
struct Descriptor {
  uint32_t low;
  uint32_t high;
  // Further by so many times 16 bytes.
  __device__ __forceinline__ Descriptor operator+(uint32_t vectors) const { return {low + vectors, high}; }
  __device__ __forceinline__ uint64_t bits() const { return (static_cast<uint64_t>(high) << 32) | low; }
};

// A K-major operand whose rows are RowBytes (128 or 64) long and swizzled over that span. `address` is the first row's, which
// lies on 8 rows; a step of 32 bytes along K is `+ 2`.
template <int RowBytes>
__device__ __forceinline__ Descriptor wgmma_descriptor(uint32_t address) {
  static_assert(RowBytes == 128 || RowBytes == 64);
  constexpr uint32_t kSwizzle = RowBytes == 128 ? 1 : 2;
  constexpr uint32_t kEightRows = RowBytes * 8 / 16;
  return {(address % (1u << 18) >> 4) + (1u << 16), (kSwizzle << 30) | kEightRows};
}

// An operand of 16-bit elements whose rows lie along N, 64 of them (128 bytes, swizzled) in a panel; panels follow each other
// after PanelBytes. `address` is the first row's, which lies on 8 rows.
template <int PanelBytes>
__device__ __forceinline__ Descriptor wgmma_descriptor_rows_along_n(uint32_t address) {
  constexpr uint32_t kEightRows = 1024 / 16;
  return {(address % (1u << 18) >> 4) + (PanelBytes / 16u << 16), (1u << 30) | kEightRows};
}

}  // namespace sage::ptx
