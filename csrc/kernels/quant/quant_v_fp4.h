// V in e2m1, transposed: what host and device agree on.
#pragma once

#include "kernels/quant/fp4.h"

namespace sage {

// Blocks are Fp4::v_block. Of the 64 keys of a row, key 32h + 8f + 2t + e stands at 32h + 8t + 2f + e, where P has it (fp4/softmax.cuh); so what
// shares a scale are the keys of h whose t is 0 or 1, or 2 or 3.
struct QuantVFp4 : QuantV {
  static constexpr float kLargest = Fp4::kLargest;
  static constexpr int kScaleSize = 4;
  SAGE_HOST_DEVICE static constexpr bool first_apart() { return true; }
  SAGE_HOST_DEVICE static constexpr int block_bytes(int head_dim) { return Fp4::v_block(head_dim); }
  // A chunk is what shares a scale.
  SAGE_HOST_DEVICE static constexpr int key(int chunk, int j, int i) { return chunk / 2 * 32 + j * 8 + chunk % 2 * 4 + i; }
};

}  // namespace sage
