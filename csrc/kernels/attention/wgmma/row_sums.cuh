// Sums of a row's probabilities, as rounded.
#pragma once

#include "kernels/element.cuh"

namespace sage {

// Adds a block's to those of this lane's columns in two rows: pairs in Element first, which halves the instructions. A tree of eight loses less than
// rounding the probabilities did.
template <typename Element>
__device__ __forceinline__ void add_to_sums(const uint32_t (&probabilities)[4][4], float (&row_sums)[2]) {
  using P = Pair<Element>;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    uint32_t sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = P::add(probabilities[i][row], probabilities[i][row + 2]);
    const float2 pair = P::unpack(P::add(P::add(sums[0], sums[1]), P::add(sums[2], sums[3])));
    row_sums[row] += pair.x + pair.y;
  }
}

}  // namespace sage
