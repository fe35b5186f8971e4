// cp.async: copies from global to shared memory beside the computation, in groups.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

// Copies the first `source_bytes` of so many, and writes zeros for the others, which are not read.
template <int Bytes>
__device__ __forceinline__ void cp_async(uint32_t shared_destination, const void* source, int source_bytes) {
  static_assert(Bytes == 4 || Bytes == 16);
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_destination), "l"(source), "r"(source_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_destination), "l"(source), "r"(source_bytes) : "memory");
  }
}
__device__ __forceinline__ void cp_async_16(uint32_t shared_destination, const void* source, bool valid) {
  cp_async<16>(shared_destination, source, valid ? 16 : 0);
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `Pending` of this thread's newest groups are unfinished.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

}  // namespace sage::ptx
