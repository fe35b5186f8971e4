// Attention with INT8 QK^T and FP16 PV, summed in FP16 for 64 keys at a time, on mma.sync: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct Sm80QkInt8PvF16AccumF16 : MmaSyncLayout<Values::kF16> {};

}  // namespace sage
