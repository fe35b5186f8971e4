// Describes tensors to the copy engine of compute capability 9.0 and later.
#pragma once

#include <cstdint>

#include "kernels/tensor_view.h"

namespace sage::runtime {

// What one copy brings to shared memory: channels x tokens. Swizzled, it is 64 channels wide: rows of 128 bytes.
struct Box {
  int32_t channels;
  int32_t tokens;
  bool swizzled;
};

// For `device`: of a 16-bit tensor whose view is aligned16. What lies outside the tensor reads as zero.
TensorMap encode_tensor_map(int device, const TensorView& view, int32_t batch, int32_t heads, int32_t tokens,
                            int32_t channels, const Box& box);

}  // namespace sage::runtime
