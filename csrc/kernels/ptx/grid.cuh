// What holds for a whole grid, and between it and the one launched before it.
#pragma once

namespace sage::ptx {

// griddepcontrol (sm_90 on): a kernel may start before the one before it in the stream has ended, and waits for its end, for what it left and for its
// memory. If every thread of that one waits before it lets others start, all earlier kernels have ended too. A call's first kernel does so: later ones read
// the caller's tensors without a wait. On older GPUs both are no operations.
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

// Adds to a number in global memory and returns what it was. Who adds later sees what this thread wrote, or met others at a barrier that
// had written.
__device__ __forceinline__ int atomic_add_acq_rel(int* pointer, int x) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;\n" : "=r"(before) : "l"(pointer), "r"(x) : "memory");
  return before;
}

}  // namespace sage::ptx
