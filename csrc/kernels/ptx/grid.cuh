// How a grid follows the one launched before it. griddepcontrol (sm_90 on): a kernel may start before the kernel it depends on has
// ended, and waits where it needs that kernel's results. Without the launch attribute, and on older GPUs, both are no operations.
#pragma once

namespace sage::ptx {

__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace sage::ptx
