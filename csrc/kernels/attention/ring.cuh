// Stages of shared memory in turn.
#pragma once

namespace sage {

// Position in a ring of places; the parity of their phases changes with every round.
template <int Places>
struct Ring {
  int place = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++place == Places) {
      place = 0;
      parity ^= 1;
    }
  }
};

}  // namespace sage
