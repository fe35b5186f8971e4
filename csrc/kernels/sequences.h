// Packed sequences: tensors [tokens, heads, channels] in which sequence i has the tokens cu_seqlens[i] .. cu_seqlens[i+1].
// Kernels work on tiles of tokens, and no tile spans two sequences. Which tiles there are follows from cu_seqlens, which
// is on the device, while the host must size grids and workspace. So tiles have slots, some of them unused: tile t of
// sequence i has slot cu_seqlens[i] / tile + i + t. That leaves room for every sequence (floor(b / n) + 1 is at least
// floor(a / n) + ceil((b - a) / n)), needs no sum over the sequences, and is bounded by what the host knows.
#pragma once

#include "kernels/tensor_view.h"

namespace sage {

// Slots for tiles of so many tokens.
SAGE_HOST_DEVICE constexpr int64_t slots(int64_t tokens, int64_t sequences, int32_t tile) {
  return tokens / tile + sequences;
}

}  // namespace sage
