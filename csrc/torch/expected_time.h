// How long attention takes on Hopper, by our kernel and by PyTorch's own attention: as their rounds of tiles predict it.
#pragma once

#include <cstdint>

#include "torch/call.h"

namespace sage {

// Whether cuDNN's attention, as PyTorch calls it, is expected to take no longer than ours: with few queries or keys, which do not repay
// quantising K, or where its tiles of 128 rows happen to fill their rounds and ours do not. Of calls without a mask, or with a bias of so many
// elements, and of more rows than are the 16-bit kernels'; looks at sizes alone. No: where they are likely to be others at each call.
bool pytorch_is_faster(const Call& call, int32_t multiprocessors, int64_t bias = 0);

}  // namespace sage
