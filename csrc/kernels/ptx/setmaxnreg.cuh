// setmaxnreg (sm_90a): registers go from warpgroup to warpgroup.
#pragma once

namespace sage::ptx {

// Gives registers of this warpgroup back to the block, or takes them.
template <int Registers>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_acquire() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

}  // namespace sage::ptx
