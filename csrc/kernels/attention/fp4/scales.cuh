// Scales of an A fragment, where the tensor cores look for them.
#pragma once

#include "kernels/tensor_view.h"

namespace sage {

// A lane and its neighbour have half each of a group of 16 of the lower 32 columns, and of one of the upper 32, of rows lane / 4 and
// lane / 4 + 8: its scales are given as four bytes, lower columns first, of either the first row first. The lanes two further have the other
// groups. Answers with the four scales of one row, as ptx::mma_m16n8k64_e2m1 wants them.
struct ScaleSpread {
  uint32_t selector;  // of bytes of this lane's word and of the other lane's

  static __device__ __forceinline__ ScaleSpread mine() {
    const int place = threadIdx.x % 4;
    return {(place < 2 ? 0x6240u : 0x2604u) + place % 2 * 0x1111u};
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t scales) const {
    return __byte_perm(scales, __shfl_xor_sync(0xffffffffu, scales, 2), selector);
  }
};

}  // namespace sage
