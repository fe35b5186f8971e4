// How long attention takes on Hopper, by our kernel and by PyTorch's own attention: as their rounds of tiles predict it.
#pragma once

#include <cstdint>

#include "torch/call.h"

namespace sage {

// Whether cuDNN's attention, as PyTorch calls it, is expected to take no longer than ours: with few queries or keys, which do not repay
// quantising K, or where its tiles of 128 rows happen to fill their rounds and ours do not. Of calls without a mask; looks at sizes alone.
bool pytorch_is_faster(const Call& call, int32_t multiprocessors);

}  // namespace sage
