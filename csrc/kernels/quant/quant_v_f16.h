// V in FP16, whatever it was: what host and device agree on.
#pragma once

#include "kernels/quant/quant_v.h"

namespace sage {

// Blocks are [64 keys][kHeadDim].
struct QuantVF16 : QuantV {
  SAGE_HOST_DEVICE static constexpr int block_bytes(int head_dim) { return kBlockN * head_dim * 2; }
  static constexpr int kScaleSize = 1;  // powers of two round nothing
  // |V| becomes at most this: mma_sync/config.cuh says why.
  static constexpr float kLargest = 0.140625f;
};

}  // namespace sage
