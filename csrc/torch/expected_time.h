// How long attention takes on Hopper, by our kernels and by PyTorch's own attention: as their rounds of tiles predict it.
#pragma once

#include <cstdint>

#include "torch/call.h"

namespace sage {

enum class Way : int32_t { kQuantised, kIn16Bits, kPytorch };

struct Fastest {
  Way way;
  int32_t tile_rows = 0;  // of kIn16Bits: TilesIn16Bits
};

// Which of them is expected to take least: with few queries or keys, which do not repay quantising K, one in 16 bits, or cuDNN's attention, as PyTorch calls
// it, where its tiles of 128 rows happen to fill their rounds and ours do not. Of calls without a mask, or with a bias of so many elements, and of more rows
// than are the kernels' of few tokens; looks at sizes alone. Never cuDNN's where they are likely to be others at each call.
Fastest fastest(const Call& call, int32_t multiprocessors, int64_t bias, bool in_16_bits, bool by_pytorch);

}  // namespace sage
