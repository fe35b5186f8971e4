// A kernel that may overlap the one before it is the first to run: that one is made when no thread can go on without.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline void grid_dependency_launch() {
  if (gpu::must_wait != gpu::kNever && !gpu::current->waited) gpu::fail("others may start before the kernels before have been waited for");
}
inline void grid_dependency_wait() {
  gpu::current->waited = true;
  if (gpu::before != nullptr) gpu::wait(gpu::ends_seen, gpu::ends_seen);
}

inline int atomic_add_acq_rel(int* pointer, int x) { return atomicAdd(pointer, x); }

}  // namespace sage::ptx
