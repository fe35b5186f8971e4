// A kernel that may overlap the one before it is the first to run: that one is made when the first thread waits for it.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline void grid_dependency_launch() {}
inline void grid_dependency_wait() {
  if (gpu::before == nullptr) return;
  const char* failure = std::exchange(gpu::before, nullptr)();
  if (failure != nullptr) gpu::fail(failure);
}

}  // namespace sage::ptx
