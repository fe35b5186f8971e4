// How long attention takes on Hopper, by the kernel that quantises K and by the one that quantises nothing: as what shapes their tiles predicts it.
#pragma once

#include <cstdint>

#include "torch/call.h"
#include "torch/mask.h"

namespace sage {

// Rows of a tile (TilesIn16Bits) where Hopper's kernel in 16 bits is expected to be faster than the call's own, which quantises; else 0. Of calls of more rows
// than are the kernels' of few tokens; looks at sizes alone.
int32_t faster_in_16_bits(const Call& call, MaskForm mask, int32_t multiprocessors);

}  // namespace sage
