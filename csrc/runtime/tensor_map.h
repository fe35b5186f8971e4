// Describes tensors to the copy engine of compute capability 9.0 and later.
#pragma once

#include <cstdint>

#include "kernels/tensor_view.h"

namespace sage::runtime {

// For `device`: of a 16-bit tensor whose view is aligned16. One copy brings a box of 64 channels x `box_tokens` to shared memory, rows
// of 128 bytes, swizzled. What lies outside the tensor reads as zero.
TensorMap encode_tensor_map(int device, const TensorView& view, int32_t batch, int32_t heads, int32_t tokens,
                            int32_t channels, int32_t box_tokens);

}  // namespace sage::runtime
