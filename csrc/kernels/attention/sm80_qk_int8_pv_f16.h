// Attention with INT8 QK^T and FP16/BF16 PV on mma.sync: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct Sm80QkInt8PvF16 : MmaSyncLayout<Values::kAsGiven> {};

}  // namespace sage
