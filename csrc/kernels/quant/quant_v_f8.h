// V in e4m3, transposed: what host and device agree on.
#pragma once

#include "kernels/quant/quant_v.h"

namespace sage {

// Blocks are [kHeadDim][64 keys]. In each 16 keys the order is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, in which P's fragments come.
struct QuantVF8 : QuantV {
  SAGE_HOST_DEVICE static constexpr int block_bytes(int head_dim) { return kBlockN * head_dim; }
  static constexpr int kScaleSize = 4;
  static constexpr float kLargest = 4.5f;  // what |V| becomes at most: mma_sync/config.cuh says why
};

}  // namespace sage
