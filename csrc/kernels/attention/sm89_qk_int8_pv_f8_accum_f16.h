// Attention with INT8 QK^T and FP8 PV, summed in FP16 for 64 keys at a time, on mma.sync: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct Sm89QkInt8PvF8AccumF16 : MmaSyncLayout<Values::kE4m3> {};

}  // namespace sage
