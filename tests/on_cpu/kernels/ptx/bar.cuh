// Barriers among some of the warps of a block.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline bool named_barrier_any(int id, int threads, bool predicate) {
  if (id < 1 || id > 15 || threads % gpu::kLanes != 0) gpu::fail("barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads");
  gpu::exchange<struct NamedBarrier>(id);
  return gpu::pass_any(gpu::current->block->named[id], threads, predicate);
}
inline void named_barrier(int id, int threads) { named_barrier_any(id, threads, false); }

}  // namespace sage::ptx
