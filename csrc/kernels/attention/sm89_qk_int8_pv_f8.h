// Attention with INT8 QK^T and FP8 PV on mma.sync: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct Sm89QkInt8PvF8 : MmaSyncLayout<Values::kE4m3> {};

}  // namespace sage
