// Kernels run one after the other.
#pragma once

namespace sage::ptx {

inline void grid_dependency_launch() {}
inline void grid_dependency_wait() {}

}  // namespace sage::ptx
