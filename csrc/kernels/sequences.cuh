// Finding the sequence that a tile belongs to.
#pragma once

#include "kernels/sequences.h"

namespace sage {

struct Sequence {
  int index;
  int first_token;
  int length;
  int first_slot;
};

// What lies beyond the last sequence counts as one more, number `sequences`: of queries, it is one without keys.
__device__ __forceinline__ Sequence sequence_at(const int32_t* cu_seqlens, int sequences, int tokens, int tile, int index) {
  // cu_seqlens comes unchecked from the caller: wrong ones shall give wrong results, not wild addresses.
  const int first = min(max(cu_seqlens[index], 0), tokens);
  const int end = index < sequences ? min(max(cu_seqlens[index + 1], first), tokens) : tokens;
  return {index, first, end - first, first / tile + index};
}

// The sequence in whose slots `slot` is, or what lies beyond the last one. By a whole warp, which looks at 32 sequences at a time.
__device__ __forceinline__ Sequence find_sequence(const int32_t* cu_seqlens, int sequences, int tokens, int tile, int slot) {
  int low = 0, high = sequences + 1;  // the first slot of `low` is at most `slot`, that of `high` is not
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int probe = low + (static_cast<int>(threadIdx.x) % 32 + 1) * step;
    // Its first slot is at most `slot`, without a division: x / tile <= n is x < (n + 1) * tile.
    const bool reached =
        probe < high && min(max(cu_seqlens[probe], 0), tokens) < int64_t{slot - probe + 1} * tile;
    low += __popc(__ballot_sync(0xffffffffu, reached)) * step;
    high = min(low + step, high);
  }
  Sequence found = sequence_at(cu_seqlens, sequences, tokens, tile, low);
  found.first_slot = min(found.first_slot, slot);  // of a wrong cu_seqlens, which does not rise from 0
  return found;
}

}  // namespace sage
