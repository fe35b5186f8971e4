// bar: barriers among some of the warps of a block.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

// Barrier `id` (1 to 15) among `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// The same, which tells whether something holds for one of them.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}\n" : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<int32_t>(predicate)) : "memory");
  return any;
}

}  // namespace sage::ptx
