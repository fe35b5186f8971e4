// What the driver's stand-in puts into a tensor map, and the copy engine's reads there.
#pragma once

#include <cstdint>
#include <cstring>

namespace gpu {

constexpr int kDimensions = 4;
constexpr int kSwizzle128 = 3;  // the driver's number

struct TensorMap {
  const uint8_t* data;
  uint64_t sizes[kDimensions];
  uint64_t strides[kDimensions - 1];  // in bytes, of the dimensions after the first
  uint32_t box[kDimensions];
};
static_assert(sizeof(TensorMap) <= 128);

// cuTensorMapEncodeTiled, of 16-bit elements with the 128-byte swizzle; what else the driver refuses is refused (1: CUDA_ERROR_INVALID_VALUE).
inline int encode(void* map, int data_type, uint32_t rank, void* data, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                  const uint32_t* element_strides, int interleave, int swizzle, int, int out_of_bounds) {
  constexpr int kUint16 = 1, kNone = 0, kZeros = 0, kInvalid = 1;
  TensorMap encoded{static_cast<const uint8_t*>(data)};
  if (data_type != kUint16 || rank != kDimensions || interleave != kNone || swizzle != kSwizzle128 || out_of_bounds != kZeros) return kInvalid;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0 || box[0] * 2 > 128) return kInvalid;
  for (int i = 0; i < kDimensions; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1) return kInvalid;
    encoded.sizes[i] = sizes[i];
    encoded.box[i] = box[i];
    if (i == 0) continue;
    if (strides[i - 1] % 16 != 0 || strides[i - 1] >= uint64_t{1} << 40) return kInvalid;
    encoded.strides[i - 1] = strides[i - 1];
  }
  std::memcpy(map, &encoded, sizeof encoded);
  return 0;
}

}  // namespace gpu
